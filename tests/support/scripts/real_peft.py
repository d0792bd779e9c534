"""LoRA on a frozen GPT-2 with peft, saved and loaded again. `real_peft.py OUT`.

Saves losses and weights to OUT.0, and the adapter to the folder OUT.adapter.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel


def base():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=64, n_embd=96, n_layer=2, n_head=4))


def main():
    out = sys.argv[1]
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(base(), lora)
    losses = []
    for start in (0, 3):
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step in range(start, start + 3):
            tokens = torch.randint(0, 200, (8, 48), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.save_pretrained(out + ".adapter")
        if start == 0:
            model = PeftModel.from_pretrained(base(), out + ".adapter", is_trainable=True)
    torch.save({"losses": losses, "state": model.state_dict()}, f"{out}.0")


if __name__ == "__main__":
    main()
