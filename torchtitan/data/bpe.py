"""Training of a tokenizer on a data set: byte-level BPE, as a `tokenizer.json`.

Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016,
on bytes, so that no text is out of vocabulary. Words are split by Llama 3's pattern.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchtitan.config import ConfigError, local_path
from torchtitan.data.order import SinglePass
from torchtitan.data.settings import DATASETS, DataConfig
from torchtitan.data.sources import open_source
from torchtitan.data.tokenizer import ByteTokenizer, TiktokenTokenizer
from torchtitan.logging import logger, on_terminal
from torchtitan.remote import is_url

SPECIAL_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>"]


def train_bpe(
    texts: Iterable[str], vocab_size: int, path: Path, *, show_progress: bool = False
) -> None:
    """Write a tokenizer of at most `vocab_size` tokens learned from `texts` to the file `path`.

    It has fewer if the texts have too few different words. The file appears only when complete.
    """
    import tokenizers

    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size: {vocab_size} is too small; every byte and {' and '.join(SPECIAL_TOKENS)} "
            f"need {smallest}"
        )
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(TiktokenTokenizer.pattern), behavior="isolated"
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    unfinished.replace(path)


def train_tokenizer(
    dataset: str,
    dataset_path: str | None,
    vocab_size: int,
    output: str,
    documents: int | None = 100_000,
    text_key: str = "text",
    seed: int = 0,
) -> Path:
    """Learn a tokenizer from up to `documents` documents of a data set, each read once.

    `output` is a folder, or a file that ends in .json; the path of the file written is returned.

    Raises:
        ConfigError: if that file exists, or the data set has no text.
    """
    if (known := DATASETS.get(dataset)) and known.content != "text":
        named = ", ".join(name for name, each in DATASETS.items() if each.content == "text")
        raise ConfigError(
            f"--dataset: got {dataset}, which holds {known.content}; name a data set of text "
            f"({named}), or a path"
        )
    config = DataConfig.model_validate(
        {"dataset": dataset, "dataset_path": dataset_path, "text_key": text_key}
    )
    if is_url(output):
        raise ConfigError(f"--output: got {output}; wanted a file on a disk, to upload after it")
    path = local_path(output)
    if path.suffix != ".json":
        path = path / "tokenizer.json"
    if path.exists():
        raise ConfigError(
            f"{path}: exists already, and runs may depend on it; choose another --output, or "
            "delete the file"
        )
    texts = itertools.islice(_one_epoch(config, seed), documents)
    train_bpe(_counted(texts), vocab_size, path, show_progress=on_terminal(sys.stdout))
    logger.info("wrote %s", path)
    return path


def _one_epoch(config: DataConfig, seed: int) -> Iterator[str]:
    source = SinglePass(open_source(config, ByteTokenizer(), seed=seed))
    for document in source.read({0: None}, 1)[0]:
        if not isinstance(document.content, str):
            raise ConfigError(f"the data set {config.dataset!r} has no text to train on")
        yield document.content


def _counted(texts: Iterable[str], every: int = 10_000) -> Iterator[str]:
    number = characters = 0
    for number, text in enumerate(texts, 1):
        characters += len(text)
        if number % every == 0:
            logger.info("read %d documents, %.1f million characters", number, characters / 1e6)
        yield text
    logger.info("training on %d documents, %.1f million characters", number, characters / 1e6)
