"""Finds the text files in a folder or of a glob, without duplicates.

Symbolic links are followed, and every folder and file is read once, so that circular links end. Run directories and
cache files of this project are skipped.
"""

import fnmatch
import glob
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from data.cache import is_cache_file

# Reasons to skip a path, in singular and plural.
BINARY = ("binary file", "binary files")
DUPLICATE = ("other name of a file that is read", "other names of files that are read")
DUPLICATE_FOLDER = ("link to a folder that is read", "links to folders that are read")
RUN_DIR = ("run directory of train.py", "run directories of train.py")
CACHE = ("cache file", "cache files")
NOT_A_FILE = ("broken link or device", "broken links or devices")


class SkippedFiles(dict[tuple[str, str], list[Path]]):
    """Paths that were skipped, by reason."""

    SHOWN = 3  # paths per reason in a message

    def add(self, reason: tuple[str, str], *paths: Path) -> None:
        """Adds paths that were skipped for a reason."""
        if paths:
            self.setdefault(reason, []).extend(paths)

    def __str__(self) -> str:
        parts = []
        for (singular, plural), paths in self.items():
            names = ", ".join(map(str, paths[: self.SHOWN])) + (", …" if len(paths) > self.SHOWN else "")
            parts.append(f"{len(paths):,} {singular if len(paths) == 1 else plural} ({names})")
        return "; ".join(parts)


def files_below(folder: Path, skipped: SkippedFiles) -> list[Path]:
    """Returns all files below a folder, sorted, without hidden ones. Raises OSError if a folder cannot be read."""
    return _unique_files(_matches(folder, ("**",), skipped), skipped)


def files_of_glob(pattern: Path, skipped: SkippedFiles) -> list[Path]:
    """Returns the files that a glob matches, sorted; `**` matches any number of folders. Raises OSError as above."""
    literal = next(index for index, part in enumerate(pattern.parts) if glob.has_magic(part))
    return _unique_files(_matches(Path(*pattern.parts[:literal]), pattern.parts[literal:], skipped), skipped)


def _matches(folder: Path, pattern: tuple[str, ...], skipped: SkippedFiles) -> Iterator[Path]:
    """Yields the paths below a folder that match the parts of a glob, in any order and possibly more than once."""
    part, rest = pattern[0], pattern[1:]
    if not folder.is_dir():
        return
    if part == "**":
        for below in _folders(folder, skipped):
            yield from _matches(below, rest or ("*",), skipped)
    elif not glob.has_magic(part):
        path = folder / part
        if rest:
            yield from _matches(path, rest, skipped)
        elif path.exists() or path.is_symlink():
            yield path
    else:
        for path in folder.iterdir():
            if not fnmatch.fnmatch(path.name, part) or (path.name.startswith(".") and not part.startswith(".")):
                continue
            if not rest:
                yield path
            elif path.is_dir() and not _is_run_dir(path, skipped):
                yield from _matches(path, rest, skipped)


def _folders(top: Path, skipped: SkippedFiles) -> Iterator[Path]:
    """Yields a folder and all folders below it, each once: real subfolders first, then linked ones."""
    seen, real, linked = set(), deque([top]), deque()
    while real or linked:
        folder = (real or linked).popleft()
        if _identity(folder) in seen:
            skipped.add(DUPLICATE_FOLDER, folder)
            continue
        seen.add(_identity(folder))
        yield folder
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(".") and path.is_dir() and not _is_run_dir(path, skipped):
                (linked if path.is_symlink() else real).append(path)


def _unique_files(paths: Iterator[Path], skipped: SkippedFiles) -> list[Path]:
    """Returns the regular files among the paths, sorted. For several names of a file, keeps its real path."""
    names: dict[object, list[Path]] = {}
    for path in sorted(set(paths)):
        if path.is_dir():
            continue
        if not path.is_file():
            skipped.add(NOT_A_FILE, path)
        elif is_cache_file(path.name):
            skipped.add(CACHE, path)
        else:
            names.setdefault(_identity(path), []).append(path)
    files = []
    for same in names.values():
        if len(same) > 1:
            same.sort(key=lambda path: (path.resolve() != path.absolute(), path))
            skipped.add(DUPLICATE, *same[1:])
        files.append(same[0])
    return sorted(files)


def _is_run_dir(folder: Path, skipped: SkippedFiles) -> bool:
    """Whether a folder is a run or sweep directory of train.py, which is then added to `skipped`."""
    is_run = (folder / "config.yaml").is_file() and any((folder / x).exists() for x in ("train.log", "checkpoints"))
    if is_run or (folder / "multirun.yaml").is_file():
        if folder not in skipped.get(RUN_DIR, ()):
            skipped.add(RUN_DIR, folder)
        return True
    return False


def _identity(path: Path) -> object:
    """Returns a key that is equal for two paths of the same file or folder."""
    status = path.stat()
    return (status.st_dev, status.st_ino) if status.st_ino else path.resolve()
