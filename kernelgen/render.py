"""Spec to source: Jinja with strict undefined names, the include closure, and a map back to template lines."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kernelgen import __version__
from kernelgen.errors import KernelgenError
from kernelgen.specs import KernelSpec

if TYPE_CHECKING:
    import jinja2  # in functions: it takes 50 ms, a sixth of what importing kernelgen may take, and is needed when something is rendered

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](kernelgen/[^>"]+)[>"]', re.MULTILINE)
# `from kernelgen_cute.layouts import tile` and `from kernelgen_cute import layouts, pipelines`, of Python kernels.
_IMPORT = re.compile(r"^\s*from\s+kernelgen_cute(?:\.(\w+)\s+import\b|\s+import\s+(\w+(?:\s*,\s*\w+)*)\s*$)", re.MULTILINE)
# A line that is one, or the end of a line behind two spaces without a quotation mark, and has no tag of Jinja's.
_COMMENT = re.compile(r"(?:^[ \t]*//(?:(?!\{[{%#]).)*|[ \t]{2,}//(?:(?!\{[{%#]|[%}#]\})[^\"\n])*)$", re.MULTILINE)
# Marks the template line that an output line came from; \x01 and \x02 cannot occur in a template.
_MARK = re.compile("\x01([^\x01\x02]*):(\\d+)\x02")
_TAG = re.compile(r"\{%.*?%\}|\{#.*?#\}|\{\{.*?\}\}", re.DOTALL)
_BLOCK_ONLY = re.compile(r"\s*(?:(?:\{%.*?%\}|\{#.*?#\})\s*)+")


@dataclass(frozen=True)
class Source:
    """A rendered kernel.

    text      the source without its banner: this is what the cache key sees
    banner    provenance comment, written in front of the text
    includes  (name, text) of every kernelgen header, or Python module of templates/cute, reached, sorted
    lines     (template, line) of each line of ``text``, for error messages
    file_name what the source is called in the artifact folder ("kernel.cu")
    """

    text: str
    banner: str
    includes: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, int], ...]
    file_name: str


class RenderError(KernelgenError):
    """A template could not be rendered: an undefined name, a syntax error; the message names file and line."""


@cache
def _packed() -> dict[str, str]:
    """Path under templates/ -> text in an installed wheel, which holds them as one file (setup.py); nothing in a checkout."""
    try:
        data = files("kernelgen").joinpath("templates.json.bz2").read_bytes()
    except FileNotFoundError:
        return {}
    try:
        import bz2
    except ImportError as error:  # a Python that was built without it
        raise RenderError("this Python has no module bz2, with which the wheel's templates are packed; install a Python that has it, or "
                          "kernelgen from a checkout (pip install -e)") from error
    return dict(json.loads(bz2.decompress(data)))


def without_comments(path: str, text: str) -> str:
    """A template of C++ or CUDA without its comments, be they lines or the ends of lines: a cache key that saw them would have kernels
    rebuilt for a comment, and a third of what the templates take in a wheel would be comments. Lines keep their numbers."""
    return text if path.endswith((".py", ".py.jinja")) else _COMMENT.sub("", text)


@cache
def template_text(path: str) -> str:
    """Text of a file under templates/ as kernels are made of it (``without_comments``), wherever the package is installed. Raises
    RenderError if there is none."""
    if path in _packed():
        return _packed()[path]
    resource = files("kernelgen").joinpath("templates", *path.split("/"))
    try:
        return without_comments(path, resource.read_text(encoding="utf-8"))
    except OSError as error:
        raise RenderError(f"template {path!r} is not in the package ({error.strerror}); reinstall kernelgen") from error


def _with_marks(text: str, name: str) -> str:
    """Append a line mark to each template line whose end lies outside a Jinja tag."""
    inside: set[int] = set()
    for match in _TAG.finditer(text):
        start = text.count("\n", 0, match.start())
        inside.update(range(start, start + match.group().count("\n")))
    out = []
    for number, line in enumerate(text.split("\n")):
        block_only = _BLOCK_ONLY.fullmatch(line) is not None
        out.append(line if number in inside or block_only else f"{line}\x01{name}:{number + 1}\x02")
    return "\n".join(out)


def _load(template: str) -> tuple[str, str, Any]:
    """For jinja2.FunctionLoader: the marked text, what tracebacks call it, and whether it is current."""
    return _with_marks(template_text(template), template), template, lambda: True


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2

    # The output is C++ for a compiler, not HTML: nothing to escape.
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_load), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )


def _unmark(marked: str, template: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Strip the marks. A line without one belongs to the next mark: it is part of an expression of several lines."""
    lines: list[str] = []
    origins: list[tuple[str, int]] = []
    current = (template, template_text(template).count("\n") + 1)
    for line in reversed(marked.split("\n")):
        marks = _MARK.findall(line)
        if marks:
            current = (marks[-1][0], int(marks[-1][1]))
        lines.append(_MARK.sub("", line))
        origins.append(current)
    return "\n".join(reversed(lines)), tuple(reversed(origins))


def include_closure(text: str) -> tuple[tuple[str, str], ...]:
    """Every kernelgen header that ``text`` reaches, as (name, content), sorted by name."""
    found: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = template_text(f"include/{name}")
            pending += _INCLUDE.findall(found[name])
    return tuple(sorted(found.items()))


def import_closure(text: str) -> tuple[tuple[str, str], ...]:
    """Every module of templates/cute that a Python kernel reaches, as (name, content), sorted by name."""
    found: dict[str, str] = {}
    pending = _imported(text)
    while pending:
        module = pending.pop()
        name = f"kernelgen_cute/{module}.py"
        if name not in found:
            found[name] = template_text(f"cute/{module}.py")
            pending += _imported(found[name])
    return tuple(sorted(found.items()))


def _imported(text: str) -> list[str]:
    return [name for module, names in _IMPORT.findall(text) for name in ([module] if module else re.split(r"\s*,\s*", names))]


def constants(spec: KernelSpec) -> str:
    """Members of a struct, one for each whole number and truth value of the spec: head_dim becomes kHeadDim. In Python lines: HEAD_DIM.

    A template that spelled each out would cost the first call of a process some 0.3 ms a line in Jinja's compiler.
    """
    if _is_python(spec):
        return "\n".join(f"{name.upper()} = {value!r}" for name, value in spec.parameters if isinstance(value, int))
    lines = []
    for name, value in spec.parameters:
        if isinstance(value, int):
            kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
            lines.append(f"  static constexpr {kind} k{''.join(map(str.capitalize, name.split('_')))} = {text};")
    return "\n".join(lines)


def _is_python(spec: KernelSpec) -> bool:
    return spec.template.endswith((".py", ".py.jinja"))


@lru_cache(maxsize=1024)
def render(spec: KernelSpec) -> Source:
    """Render a spec. Raises RenderError with template, line and the reason."""
    import jinja2

    values = dict(spec.parameters)
    if _is_python(spec):
        values["arguments"] = repr(spec.params.fields)
    else:
        values["layout_assertions"] = spec.params.assertions(spec.params_type)
    values["constants"] = constants(spec)
    try:
        marked = _environment().get_template(spec.template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"templates/{error.name}:{error.lineno}: {error.message}") from error
    except jinja2.UndefinedError as error:
        line = _failing_line(error, spec.template)
        raise RenderError(
            f"templates/{spec.template}:{line}: {error.message}; spec {spec.name} supplies {', '.join(sorted(values))}"
        ) from error
    text, lines = _unmark(marked, spec.template)
    suffix = spec.template.removesuffix(".jinja").rsplit(".", 1)[-1]
    includes = import_closure(text) if suffix == "py" else include_closure(text)
    return Source(text, _banner(spec), includes, lines, f"kernel.{suffix}")


def _failing_line(error: BaseException, template: str) -> int:
    line = 0
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == template:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _banner(spec: KernelSpec) -> str:
    # A parameter may be code of several lines, which would leave the comment.
    parameters = " ".join(f"{name}={' '.join(str(value).split())}" for name, value in spec.parameters)
    comment = "#" if _is_python(spec) else "//"
    return (
        f"{comment} generated by kernelgen {__version__} from templates/{spec.template}\n"
        f"{comment} spec: {spec}   rebuild: see build.log beside this file\n"
        f"{comment} parameters: {parameters}\n"
    )


def explain_lines(source: Source, compiler_text: str) -> str:
    """Compiler text with `kernel.cu:12` followed by the template line it came from."""
    shift = source.banner.count("\n")

    def origin(match: re.Match[str]) -> str:
        number = int(match.group("line") or match.group("paren") or match.group("python")) - shift
        if not 1 <= number <= len(source.lines):
            return match.group()
        template, line = source.lines[number - 1]
        return f"{match.group()} [templates/{template}:{line}]"

    # g++ says kernel.cc:12:5, NVRTC kernel.cu(12), Python File "kernel.py", line 12.
    pattern = re.escape(source.file_name) + r"(?::(?P<line>\d+)(?::\d+)?|\((?P<paren>\d+)\)|\", line (?P<python>\d+))"
    text = re.sub(pattern, origin, compiler_text)
    text = re.sub(r"\S*/kernelgen_cute/(\w+\.py)(\", line |:)(\d+)", r"\g<0> [templates/cute/\1:\3]", text)
    # Headers are named as included; say where they lie in the repository.
    return re.sub(r"(?<![\w/])(?:include/)?(kernelgen/[\w/]+\.(?:cuh|h)\b)", r"templates/include/\1", text)
