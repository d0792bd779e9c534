"""A Llama with transformers' Trainer in bf16, with gradient checkpointing and clipping.

Run as `real_trainer_checkpointing.py OUT`.

Saves losses and weights to OUT.0.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main():
    out = sys.argv[1]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="sdpa",
    )
    tokens = torch.randint(0, 200, (64, 64), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=out + ".checkpoints",
        per_device_train_batch_size=8,
        max_steps=4,
        bf16=True,
        gradient_checkpointing=True,
        max_grad_norm=1.0,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.save({"losses": losses, "state": trainer.model.state_dict()}, f"{out}.0")


if __name__ == "__main__":
    main()
