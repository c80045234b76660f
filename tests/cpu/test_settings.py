"""Environment: typed, read once, unknown names reported, illegal values refused with the legal ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kernelgen.errors import SettingsError
from kernelgen.settings import read


def test_defaults_and_empty_values() -> None:
    assert read({}) == read({"KERNELGEN_CACHE_DIR": "", "CXX": "", "CUDA_HOME": ""})
    assert read({}).jit and read({}).cache_dir is None


@pytest.mark.parametrize("text, value", [("0", False), ("1", True), ("off", False), ("YES", True)])
def test_switches(text: str, value: bool) -> None:
    assert read({"KERNELGEN_JIT": text}).jit is value


@pytest.mark.parametrize(
    "variable, text, legal",
    [
        ("KERNELGEN_JIT", "maybe", "true"), ("KERNELGEN_MAX_JOBS", "0", "at least 1"), ("KERNELGEN_MAX_JOBS", "many", "at least 1"),
        ("KERNELGEN_BACKEND", "cudnnn", "cudnn"), ("KERNELGEN_CPU_ISA", "native", "x86-64-v3"),
    ],
)
def test_illegal_values_list_the_legal_ones(variable: str, text: str, legal: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read({variable: text})
    assert variable in str(caught.value) and text in str(caught.value) and legal in str(caught.value)


def test_unknown_variable_is_reported_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kernelgen"):
        read({"KERNELGEN_CACHEDIR": "/x", "OTHER": "1"})
    assert "KERNELGEN_CACHEDIR" in caplog.text and "did you mean KERNELGEN_CACHE_DIR" in caplog.text
    assert "OTHER" not in caplog.text


def test_layers_are_a_list(tmp_path: Path) -> None:
    assert read({"KERNELGEN_CACHE_LAYERS": "/a:/b c:"}).cache_layers == (Path("/a"), Path("/b c"))


def test_a41_cuda_home(tmp_path: Path) -> None:
    """A41: a stray ':' or a missing folder in CUDA_HOME is refused by name and value; a trailing '/' is fine."""
    assert read({"CUDA_HOME": f"{tmp_path}/"}).cuda_home == tmp_path
    assert read({"CUDA_HOME": ""}).cuda_home is None
    for bad in (f":{tmp_path}", f"{tmp_path}:", f"{tmp_path}:{tmp_path}", "/does/not/exist"):
        with pytest.raises(SettingsError) as caught:
            read({"CUDA_HOME": bad})
        assert "CUDA_HOME" in str(caught.value) and bad in str(caught.value)


def test_paths_stay_where_they_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that changed its folder recorded, and cached, in another place than it was told."""
    monkeypatch.chdir(tmp_path)
    made = read({"KERNELGEN_RECORD": "specs.jsonl", "KERNELGEN_CACHE_DIR": "cache", "KERNELGEN_CACHE_LAYERS": "a:./b",
                 "KERNELGEN_LOCK_DIR": "l"})
    monkeypatch.chdir("/")
    assert (made.record, made.cache_dir, made.lock_dir) == (tmp_path / "specs.jsonl", tmp_path / "cache", tmp_path / "l")
    assert made.cache_layers == (tmp_path / "a", tmp_path / "b")
