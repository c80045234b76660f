"""Writes ``recorded.py`` and ``kernels.py`` from the table: ``python -m kernelgen.library.write``. A test holds the files against it.

Files and no closures over the table: dynamo guards everything that a function looks up, and what is written out it need not look up; and
an operator's kernel that went by the table took 2 us more. Nothing else imports this module.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from kernelgen.library.forms import FORMS, plans
from kernelgen.library.operators import Overload, Slot, is_written, kernel_name, overloads_of
from kernelgen.library.table import ROWS, Parameter, Row

_WIDTH = 140
_HEAD = '''"""Calls of the operators, with the signatures of the public functions. Written by write.py: change the table, then run it."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.library import forms, helpers, shapes
'''


_KERNELS = '''"""Kernels of operators: from flat arguments to the public function. Written by write.py: change the table, then run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelgen.library import forms
'''


def text() -> str:
    return _HEAD + "".join(f"\n\n{_call(row)}\n" for row in ROWS)


def kernels_text() -> str:
    return _KERNELS + "".join(f"\n\n{_kernel(o)}\n" for row in ROWS for o in overloads_of(row) if is_written(o))


def _kernel(o: Overload) -> str:
    flat = [*o.flat[: o.required], *(f"{name}={_literal(default)}" for name, default in zip(o.flat[o.required :], o.defaults))]
    flat = flat[: o.taken]
    given = [name.partition("=")[0] for name in flat]
    positional = [p.name for p in o.row.all_parameters if not p.keyword]
    parts: list[str] = []
    for slot in o.slots:
        if not slot.places or slot.places[0] >= len(given) or slot.name == "out_scales":
            continue
        value = _joined(o, slot, given)
        if slot.name == "out" and "out_scales" in given:
            value = "out if out_scales is None else (out, out_scales)"
        if positional[:1] == [slot.name]:
            parts.append(value)
            positional.pop(0)
        else:
            parts.append(f"{slot.name}={value}")
            positional.clear()
    parts += [f"{name}={_literal(value)}" for name, value in o.fixed.items()]
    lines = [f"def {kernel_name(o)}(call: Callable[..., Any]) -> Callable[..., Any]:"]
    lines += _wrapped("    def kernel(", [name.replace("=", ": Any = ") if "=" in name else f"{name}: Any" for name in flat], ") -> Any:")
    lines += _wrapped(f"        {'return ' if o.results else ''}call(", parts, ")")
    return "\n".join([*lines, "", "    return kernel"])


def _joined(o: Overload, slot: Slot, given: list[str]) -> str:
    """The public argument as an expression of the flat ones."""
    names = [given[place] for place in slot.places if place < len(given)]
    if slot.join is None:
        return names[0]
    form = next(FORMS[p.type] for p in o.row.all_parameters if p.name == slot.name)
    if form.alone and len(names) == 1:
        return names[0]
    where = "plans.get" if slot.join == plans.get else slot.join.__name__
    missing = [_literal(o.defaults[place - o.required]) for place in slot.places if place >= len(given)]
    joined = f"forms.{where}({', '.join([*names, *missing])})"
    return f"{names[0]} if {names[form.alone]} is None else {joined}" if form.alone else joined


def _call(row: Row) -> str:
    overloads = {o.name: o for o in overloads_of(row)}
    plain = overloads[""]
    lines = [_signature(row)]
    lines += [f"    {p.name} = {p.default} if {p.name} is None else {p.name}" for p in row.all_parameters if _inside(p)]
    if row.before:
        helper, *names = row.before
        lines += _wrapped(f"    {', '.join(names)} = helpers.{helper}(", names, ")")
    if row.totals:
        lines.append(f"    totals = helpers.totals_of({row.totals}, out)")
    if row.pair:
        lines += ["    writes = out is not None", "    out, out_scales = helpers.as_pair(out)"]
    elif row.outputs:
        lines.append(f"    writes = {' or '.join(f'{name} is not None' for name in row.outputs)}")
    if len(row.written) > 1:
        taken = inspect.signature(row.shapes).parameters
        arguments = [f"{p.name}={p.name}" for p in row.all_parameters if p.name in taken]
        lines.append("    if writes:")
        lines += _wrapped(f"        made = shapes.{row.shapes.__name__}(", arguments, ")")
        lines.append(f"        {', '.join(row.written)} = helpers.filled(({', '.join(row.written)}), made)")
    if row.also is not None:
        lines.append(f"    also = {row.also.when}")
    for p in row.all_parameters:
        if p.type in FORMS and p.name in {slot.name for slot in plain.slots}:
            lines += _taken_apart(p, plain)
    tail = plain.flat[plain.required :]
    if tail:
        lines += _trimmed(list(tail), list(map(_literal, plain.defaults)))
    lines += _choices(row, overloads, tail=bool(tail))
    return "\n".join(lines)


def _signature(row: Row) -> str:
    parts, keyword = [], False
    for p in row.all_parameters:
        if p.keyword and not keyword:
            keyword = True
            parts.append("*")
        parts.append(f"{p.name}: Any" + ("" if p.required else f" = {_literal(None if _inside(p) else p.default)}"))
    return "\n".join(_wrapped(f"def {row.name}(", parts, ") -> Any:"))


def _inside(p: Parameter) -> bool:
    """A float that a function has as its default would be a symbol, and an input of the graph; one in its code is a constant."""
    return isinstance(p.default, float)


def _taken_apart(p: Parameter, o: Overload) -> list[str]:
    slot = next(slot for slot in o.slots if slot.name == p.name)
    split = FORMS[p.type].split.__name__
    if not slot.places:
        return [f"    forms.{split}({p.name})"]
    names = [o.flat[place] for place in slot.places]
    return [f"    {', '.join(names)}{',' if len(names) == 1 else ''} = forms.{split}({p.name})"]


def _choices(row: Row, overloads: dict[str, Overload], tail: bool) -> list[str]:
    lines: list[str] = []
    more = row.more
    if row.outputs:
        lines += _both(row, overloads, "out", "    if writes:", tail)
        lines.append(f"        return {_given_back(row)}")
    if more is not None:
        lines += _both(row, overloads, more.name, f"    if {more.when}:", tail, result="made = " if row.totals else "return ")
        lines += ["        return helpers.by_name(made, totals)"] if row.totals else []
    result = "made = " if row.unpack else "return "
    plain = _both(row, overloads, "", "", tail, result=result)
    if row.brief:
        lines += _both(row, overloads, "full", f"    if len(tail) > {row.brief}:", tail, result=result)
        if row.unpack:
            plain = ["    else:", *(f"    {line}" for line in plain)]
    lines += plain
    if row.unpack:
        helper, *names = row.unpack
        lines.append(f"    return helpers.{helper}({', '.join(['made', *names])})")
    return lines


def _both(row: Row, overloads: dict[str, Overload], name: str, condition: str, tail: bool, result: str = "") -> list[str]:
    """The overload ``name``, and its twin of the row's ``also``."""
    indent = "        " if condition else "    "
    lines = [condition] if condition else []
    if row.also is None:
        return lines + _operator(row, overloads[name], indent, result, tail)
    twin = overloads[f"{row.also.name}_{name}" if name else row.also.name]
    lines.append(f"{indent}if also:")
    lines += _operator(row, twin, indent + "    ", result, tail)
    lines.append(f"{indent}else:")
    return lines + _operator(row, overloads[name], indent + "    ", result, tail)


def _operator(row: Row, o: Overload, indent: str, result: str, tail: bool) -> list[str]:
    head = [*o.flat[: o.required], *(["*tail"] if tail else [])]
    return _wrapped(f"{indent}{result}torch.ops.kernelgen.{row.name}.{o.name or 'default'}(", head, ")")


def _given_back(row: Row) -> str:
    names = row.written
    if row.more is not None:
        return f"({names[0]}, {names[1]}) if {row.more.when.removesuffix(' or totals')} else {names[0]}"
    return f"({', '.join(names)})" if row.results > 1 else names[0]


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _wrapped(before: str, parts: list[str], after: str) -> list[str]:
    """One line where it fits, else the parts on lines of their own, as many in each as fit."""
    one = before + ", ".join(parts) + after
    if len(one) <= _WIDTH:
        return [one]
    indent = " " * (len(before) - len(before.lstrip()) + 4)
    lines, line = [before], indent
    for part in parts:
        if len(line) + len(part) + 2 > _WIDTH:
            lines.append(line.rstrip())
            line = indent
        line += part + ", "
    return [*lines, line.rstrip(), indent[:-4] + after]


def _trimmed(names: list[str], defaults: list[str]) -> list[str]:
    comma = "," if len(names) == 1 else ""
    one = f"    tail = helpers.trimmed(({', '.join(names)}{comma}), ({', '.join(defaults)}{comma}))"
    if len(one) <= _WIDTH:
        return [one]
    first, second = _wrapped("    tail = helpers.trimmed((", names, "), ("), _wrapped("    ), (", defaults, "))")
    return [*first[:-1], *second] if len(first) > 1 else ["    tail = helpers.trimmed((", f"        {', '.join(names)},", *second]


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "recorded.py").write_text(text())
    (folder / "kernels.py").write_text(kernels_text())
