"""A GPT-2 with transformers' Trainer: evaluation, saving, resuming, accumulation. `real_trainer.py OUT`.

Saves losses and weights to OUT.0, and Trainer's checkpoints to the folder OUT.checkpoints.
"""

import os
import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self, count, seed):
        self.tokens = torch.randint(0, 200, (count, 48), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def new_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=64, n_embd=96, n_layer=4, n_head=4))


def arguments(folder, steps):
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


def trainer(folder, steps):
    data, held_out = Tokens(128, 1), Tokens(32, 2)
    return Trainer(new_model(), arguments(folder, steps), train_dataset=data, eval_dataset=held_out)


def main():
    out = sys.argv[1]
    folder = out + ".checkpoints"
    trainer(folder, 4).train()
    resumed = trainer(folder, 6)
    resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-4"))
    losses = [v for entry in resumed.state.log_history for k, v in entry.items() if k in ("loss", "eval_loss")]
    torch.save({"losses": losses, "state": resumed.model.state_dict()}, f"{out}.0")


if __name__ == "__main__":
    main()
