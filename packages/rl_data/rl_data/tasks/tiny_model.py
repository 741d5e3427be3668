"""Tiny model for tests and examples: a Qwen3 causal LM with 0.4M parameters and a word-level tokenizer.

It lets a whole training stack run on two CPU cores. Its vocabulary has only the words of the built-in tasks
(`arithmetic.py`, `stones.py`). transformers and vLLM load it like any other model.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arithmetic import VOCABULARY_WORDS
from .stones import WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN = "<pad>", "<eos>", "<unk>"
#: Rows of the embedding; rows without a word get reserved tokens, so that every id decodes.
VOCABULARY_SIZE = 64


def _vocabulary() -> dict[str, int]:
    words = [PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN, "\n", *"0123456789", *VOCABULARY_WORDS, *WORDS]
    assert len(set(words)) == len(words) <= VOCABULARY_SIZE, "the vocabulary is too small for the words of the tasks"
    words += [f"<reserved_{index}>" for index in range(VOCABULARY_SIZE - len(words))]
    return {word: index for index, word in enumerate(words)}


def build_tiny_tokenizer() -> "PreTrainedTokenizerFast":
    """The word-level tokenizer: one token per word, punctuation mark, digit or line break.

    Numbers are encoded digit by digit ("72" is the ids of "7" and "2") and decoded without spaces, so the texts of the
    tasks are unchanged by text -> ids -> text. Decoding also joins two numbers separated only by a space, which do not
    occur in the tasks.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(_vocabulary(), unk_token=UNKNOWN_TOKEN))
    piece = r"<[a-z_0-9]+>|####|\n|\d|[A-Za-z]+|[^\sA-Za-z\d]"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Make every match a piece, then drop the spaces between them.
            pre_tokenizers.Split(Regex(piece), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), behavior="removed"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="\x00", cleanup=False),  # a space before every token except the first
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\d) (?=\d)"), ""),
            decoders.Replace(Regex(r" (?=[.?])"), ""),
            decoders.Replace(Regex(r" ?\n ?"), "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def build_tiny_model(
    folder: str | Path, *, seed: int = 0, hidden_size: int = 128, num_layers: int = 2, num_heads: int = 4,
    num_kv_heads: int = 2, **config: Any,
) -> Path:  # fmt: skip
    """Write config.json, model.safetensors (float32, random), generation_config.json and the tokenizer to `folder`.

    The same seed gives the same weights; the torch random state of the caller does not change. Returns the folder.
    `config` has further fields of `Qwen3Config`.

    The standard deviation of the random weights is 0.06. Qwen3's 0.02 is for widths in the thousands; at width 128
    training starts so slowly that the model learns the task only half as well in 300 steps.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    tokenizer = build_tiny_tokenizer()
    small = {"max_position_embeddings": 512, "initializer_range": 0.06, "tie_word_embeddings": True, **config}
    qwen3: Any = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **small,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(qwen3)
    model.to(torch.float32)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # transformers draws one for every file that it writes; this model has a small one
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
    return folder
