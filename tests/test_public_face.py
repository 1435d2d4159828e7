"""What `import furcate` gives: these names, lazily; and the README's quick start runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import furcate

README = Path(__file__).resolve().parent.parent / "README.md"
NAMES = [
    "BadFile",
    "BadRequest",
    "Busy",
    "DraftOptions",
    "Engine",
    "EngineOptions",
    "FetchFailed",
    "FurcateError",
    "OutOfPages",
    "Output",
    "Piece",
    "RequestFailed",
    "SamplingParams",
    "Stats",
    "StorageFailed",
    "Unsupported",
    "UserError",
    "__version__",
]


def test_these_names_are_the_public_face() -> None:
    assert sorted(furcate.__all__) == sorted(NAMES)
    assert set(furcate._HOME) == set(NAMES) - {"__version__"}
    assert dir(furcate) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name: str) -> None:
    assert getattr(furcate, name).__doc__


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no 'engine_of'.*SamplingParams"):
        _ = furcate.engine_of  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["__version__", "SamplingParams", "FurcateError"])
def test_light_names_do_not_load_torch(name: str) -> None:
    script = f"import sys, furcate; furcate.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_quick_start_runs_as_printed(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    assert code.count('"smollm2-135m"') == 1
    exec(compile(code.replace("smollm2-135m", str(tiny_model)), "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 50


def test_the_versions_of_package_and_changelog_agree() -> None:
    changelog = README.with_name("CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{furcate.__version__}]" in changelog
