"""A GPT-2 with transformers' Trainer under torchrun, with or without the callback: `trainer_callback.py OUT [BUDGET]`.

Saves losses, weights and what the callback has measured to OUT.<rank>.
"""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main():
    out, *budget = sys.argv[1:]
    drawn = torch.randint(0, 200, (64, 48), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=64, n_embd=96, n_layer=3, n_head=4))
    arguments = TrainingArguments(
        output_dir=out + ".checkpoints",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = []
    if budget:
        from monetrun.integrations.transformers import BudgetCallback

        callbacks.append(BudgetCallback(budget[0], implementations="exact", solver_seconds=3.0))
    trainer = Trainer(
        model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in drawn], callbacks=callbacks
    )
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    measured = callbacks[0].measured if callbacks else {}
    torch.save({"losses": losses, "state": model.state_dict(), "measured": measured}, f"{out}.{os.environ['RANK']}")


if __name__ == "__main__":
    main()
