"""Which files a folder or a glob stands for: each real file once, however many links lead to it.

Links to folders are followed. A folder is entered once, so links that lead round in a circle end. What train.py writes,
run directories and caches, is no text to train on, wherever it lies.
"""

import fnmatch
import glob
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from data.cache import is_cache_file

# Why something is left out, for one and for several.
BINARY = ("binary file", "binary files")
AGAIN = ("other name of a file that is read", "other names of files that are read")
FOLDER_AGAIN = ("link to a folder that is read", "links to folders that are read")
RUN = ("run directory of train.py", "run directories of train.py")
CACHE = ("cache file", "cache files")
SPECIAL = ("broken link or device", "broken links or devices")


class LeftOut(dict[tuple[str, str], list[Path]]):
    """What was left out, by the reason."""

    NAMED = 3  # of each reason

    def add(self, reason: tuple[str, str], *paths: Path) -> None:
        """Notes them."""
        if paths:
            self.setdefault(reason, []).extend(paths)

    def __str__(self) -> str:
        parts = []
        for (one, several), paths in self.items():
            names = ", ".join(map(str, paths[: self.NAMED])) + (", …" if len(paths) > self.NAMED else "")
            parts.append(f"{len(paths):,} {one if len(paths) == 1 else several} ({names})")
        return "; ".join(parts)


def files_below(folder: Path, left_out: LeftOut) -> list[Path]:
    """All files below a folder, sorted, but hidden ones. Raises OSError where a folder cannot be read."""
    return _distinct(_matches(folder, ("**",), left_out), left_out)


def files_of_glob(pattern: Path, left_out: LeftOut) -> list[Path]:
    """The files that a glob matches, sorted; `**` is any number of folders. Raises OSError as above."""
    literal = next(index for index, part in enumerate(pattern.parts) if glob.has_magic(part))
    return _distinct(_matches(Path(*pattern.parts[:literal]), pattern.parts[literal:], left_out), left_out)


def _matches(folder: Path, pattern: tuple[str, ...], left_out: LeftOut) -> Iterator[Path]:
    """Paths below the folder that fit the parts of a glob, in any order; some of them perhaps twice."""
    part, rest = pattern[0], pattern[1:]
    if not folder.is_dir():
        return
    if part == "**":
        for below in _folders(folder, left_out):
            yield from _matches(below, rest or ("*",), left_out)
    elif not glob.has_magic(part):
        path = folder / part
        if rest:
            yield from _matches(path, rest, left_out)
        elif path.exists() or path.is_symlink():
            yield path
    else:
        for path in folder.iterdir():
            if not fnmatch.fnmatch(path.name, part) or (path.name.startswith(".") and not part.startswith(".")):
                continue
            if not rest:
                yield path
            elif path.is_dir() and not _is_run(path, left_out):
                yield from _matches(path, rest, left_out)


def _folders(top: Path, left_out: LeftOut) -> Iterator[Path]:
    """The folder and all below it, each once: those that lie there before those that a link leads to."""
    seen, here, linked = set(), deque([top]), deque()
    while here or linked:
        folder = (here or linked).popleft()
        if _identity(folder) in seen:
            left_out.add(FOLDER_AGAIN, folder)
            continue
        seen.add(_identity(folder))
        yield folder
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(".") and path.is_dir() and not _is_run(path, left_out):
                (linked if path.is_symlink() else here).append(path)


def _distinct(paths: Iterator[Path], left_out: LeftOut) -> list[Path]:
    """Of these the files, sorted: of several names of one, links or not, that where it lies."""
    names: dict[object, list[Path]] = {}
    for path in sorted(set(paths)):
        if path.is_dir():
            continue
        if not path.is_file():
            left_out.add(SPECIAL, path)
        elif is_cache_file(path.name):
            left_out.add(CACHE, path)
        else:
            names.setdefault(_identity(path), []).append(path)
    files = []
    for same in names.values():
        if len(same) > 1:
            same.sort(key=lambda path: (path.resolve() != path.absolute(), path))
            left_out.add(AGAIN, *same[1:])
        files.append(same[0])
    return sorted(files)


def _is_run(folder: Path, left_out: LeftOut) -> bool:
    """Whether train.py made the folder, for a run or a sweep; it is then noted."""
    parts = ("train.log", "checkpoints")
    run = (folder / "config.yaml").is_file() and any((folder / part).exists() for part in parts)
    if run or (folder / "multirun.yaml").is_file():
        if folder not in left_out.get(RUN, ()):
            left_out.add(RUN, folder)
        return True
    return False


def _identity(path: Path) -> object:
    """Equal for two names of one file or folder."""
    status = path.stat()
    return (status.st_dev, status.st_ino) if status.st_ino else path.resolve()
