"""Vocabulary size of a model that follows its tokenizer."""

from collections.abc import Mapping

from torchtitan.config import ConfigError, Gathered, KeyPath, Setting
from torchtitan.data import load_tokenizer
from torchtitan.models import MODELS

SIZE: KeyPath = ("model", "vocab_size")


def follow_tokenizer(gathered: Gathered) -> None:
    """Set the vocabulary size, if the flavor leaves it open and the tokenizer has more."""
    settings = gathered.settings
    name, flavor = _setting(settings, "name", "llama3"), _setting(settings, "flavor", "debugmodel")
    spec, path = MODELS.get(name), settings.get(("model", "tokenizer_path"))
    if spec is None or flavor not in spec.open_vocabulary or SIZE in settings:
        return
    if path is None or not isinstance(path.value, str):
        return
    try:
        tokens = load_tokenizer(path.value).vocab_size
    except ConfigError:
        return  # reported by the task
    if tokens > (size := spec.flavors[flavor].vocab_size):
        settings[SIZE] = Setting(tokens, path.origin)
        gathered.notices.append(
            f"{path.origin}: model.vocab_size: is {tokens}, as the tokenizer has more than the "
            f"{size} of {flavor}"
        )


def _setting(settings: Mapping[KeyPath, Setting], key: str, default: str) -> str:
    setting = settings.get(("model", key))
    return setting.value if setting and isinstance(setting.value, str) else default
