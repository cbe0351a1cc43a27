"""The path from documents to batches: tokenizers, sources of documents, and the packing stream."""

from typing import TYPE_CHECKING

from torchtitan.packages import on_first_use

if TYPE_CHECKING:
    from torchtitan.data.batch import Batch
    from torchtitan.data.bpe import train_bpe, train_tokenizer
    from torchtitan.data.settings import (
        DATA,
        DATASETS,
        DataConfig,
        Dataset,
        data_class,
        without_idle_sections,
    )
    from torchtitan.data.sources import SOURCES, check_local, open_source
    from torchtitan.data.stream import BatchStream, DataStream, build_stream, merge_states
    from torchtitan.data.tokenizer import (
        Tokenizer,
        check_vocabulary,
        leading_tokens,
        load_tokenizer,
        separators,
    )
else:
    __getattr__ = on_first_use(__name__, __file__)
