"""Fine-tune a causal language model with LoRA adapters (peft).

    torchrun --nproc-per-node 1 recipes/lora.py --model gpt2 --output-dir adapter
    monetrun --budget 0.5x recipes/lora.py --model gpt2 --output-dir adapter

``--model`` is a folder or a name on the Hugging Face hub; ``--model random`` is a small GPT-2 with random weights that
reads bytes, for a look at memory and speed without a download. The text is Python's language reference, unless
``--text`` is given. Needs ``pip install transformers peft``.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    get_cosine_schedule_with_warmup,
)

from lib.imagenet_options import positive
from lib.python_docs import read


def base(name: str, text: str, length: int) -> tuple[nn.Module, list[int]]:
    """The model to adapt, and the text's tokens."""
    if name == "random":
        config = GPT2Config(vocab_size=256, n_positions=length, n_embd=128, n_layer=4, n_head=4)
        return GPT2LMHeadModel(config), list(text.encode())
    return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)(text)["input_ids"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--model", default="gpt2", metavar="NAME")
    add("--text", default="", metavar="FILE")
    add("--length", type=positive, default=256, metavar="TOKENS")
    add("--batch-size", type=positive, default=8, metavar="N")
    add("--steps", type=positive, default=500, metavar="N")
    add("--lr", type=float, default=3e-4)
    add("--rank", type=positive, default=8, metavar="R", help="of the adapters")
    add("--target-modules", nargs="+", metavar="NAME", help="layers to adapt; default: peft's for this architecture")
    add("--print-freq", type=positive, default=10, metavar="STEPS")
    add("--seed", type=int, default=0)
    add("--output-dir", default="adapter", metavar="DIR")
    args = options.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, tokens = base(args.model, read(args.text), args.length)
    if len(tokens) < args.batch_size * args.length:
        raise SystemExit(
            f"{len(tokens)} tokens do not fill {args.batch_size} texts of {args.length}: give a longer --text, or a "
            "smaller --batch-size or --length"
        )
    rows = torch.tensor(tokens[: len(tokens) // args.length * args.length]).view(-1, args.length)
    loader = DataLoader(TensorDataset(rows), args.batch_size, shuffle=True, drop_last=True)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.05,
        target_modules=args.target_modules,
    )  # fmt: skip
    model = get_peft_model(network, lora).to(device)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.steps // 20, args.steps)

    model.train()
    step = 0
    while step < args.steps:
        for (batch,) in loader:
            ids = batch.to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % args.print_freq == 0:
                print(f"step {step} loss {loss.item():.9f}", flush=True)
            if step == args.steps:
                break
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
