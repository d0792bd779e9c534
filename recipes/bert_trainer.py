"""Train a BERT from random weights with transformers' Trainer, to fill in masked words of Python's language reference.

    torchrun --nproc-per-node 8 recipes/bert_trainer.py --output_dir bert --per_device_train_batch_size 32
    monetrun --budget 0.5x recipes/bert_trainer.py --output_dir bert --per_device_train_batch_size 32

The options are those of ``transformers.TrainingArguments``, and the sizes of the network. The vocabulary is made
from the text, so that nothing is downloaded. Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch.utils.data import Dataset, random_split
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from lib.python_docs import read

SPECIAL = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


@dataclass
class Sizes:
    """Of the network and its text; BERT's smallest published one by default."""

    text: str = field(default="", metadata={"help": "a file; default: Python's language reference"})
    vocabulary: int = field(default=8192)
    length: int = field(default=128, metadata={"help": "tokens of a text"})
    width: int = field(default=768)
    layers: int = field(default=12)
    heads: int = field(default=12)


class Texts(Dataset):
    """Pieces of equal length."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self.pieces = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index]}


def tokenizer_for(text: str, size: int) -> PreTrainedTokenizerFast:
    """BERT's kind of tokenizer (WordPiece), whose pieces are the text's characters and its most frequent words.

    ``tokenizers.trainers`` would find better pieces, but not the same ones in each run.
    """
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    characters = sorted({character for word in words for character in word})
    frequent = [word for word, _ in sorted(words.items(), key=lambda one: (-one[1], one[0]))]
    pieces = dict.fromkeys([*SPECIAL.values(), *characters, *(f"##{c}" for c in characters), *frequent])
    vocabulary = {piece: number for number, piece in enumerate(list(pieces)[:size])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL["unk"]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{f"{k}_token": v for k, v in SPECIAL.items()})


def main() -> None:
    sizes, arguments = HfArgumentParser((Sizes, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    text = read(sizes.text)
    tokenizer = tokenizer_for(text, sizes.vocabulary)
    tokens = tokenizer(text)["input_ids"]
    if len(tokens) < sizes.length:
        raise SystemExit(
            f"{len(tokens)} tokens do not fill a text of {sizes.length}: give a longer --text, or a smaller --length"
        )
    texts = Texts(tokens, sizes.length)
    train, test = random_split(texts, [0.9, 0.1])
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.width,
            max_position_embeddings=sizes.length,
        )
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        train_dataset=train,
        eval_dataset=test if arguments.eval_strategy != "no" else None,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    if not trainer.state.global_step:  # with --dataloader_drop_last
        raise SystemExit(
            f"no step was trained: {len(train)} texts do not fill a batch: give a longer --text, or a smaller "
            "--per_device_train_batch_size"
        )
    trainer.save_model()


if __name__ == "__main__":
    main()
