"""A BERT classifier with accelerate: bf16, accumulation, clipping, a scheduler, evaluation, saved state.

Run as `real_accelerate.py OUT`.

Saves losses and weights to OUT.0, and accelerate's state to the folder OUT.state.
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification


def main():
    out = sys.argv[1]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200, hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, num_labels=3
    )
    model = BertForSequenceClassification(config)
    tokens, labels = torch.randint(0, 200, (64, 40)), torch.randint(0, 3, (64,))
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=8, shuffle=True)
    held_out = DataLoader(TensorDataset(tokens, labels), batch_size=32)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    losses = []
    for epoch in range(2):
        model.train()
        for ids, target in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=target).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses += [model(input_ids=ids, labels=target).loss.item() for ids, target in held_out]
        if epoch == 0:
            accelerator.save_state(out + ".state")
    accelerator.load_state(out + ".state")
    torch.save({"losses": losses, "state": accelerator.unwrap_model(model).state_dict()}, f"{out}.0")


if __name__ == "__main__":
    main()
