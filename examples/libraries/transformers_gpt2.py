"""A tiny GPT-2 trained by Hugging Face's Trainer, on Rallypoint's engine.

    rallypoint run --nproc-per-node 2 examples/libraries/transformers_gpt2.py

The one line that differs from any script of Trainer's is init_process_group, before
TrainingArguments: Trainer uses the process group that it finds. Weights are random at first and the
text is the source of Python's argparse, so nothing is downloaded. Needs PyTorch, transformers and
accelerate.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    dist.init_process_group("rallypoint")
    source = inspect.getsource(argparse)
    alphabet = {character: number for number, character in enumerate(sorted(set(source)))}
    text = torch.tensor([alphabet[character] for character in source])
    pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=64, vocab_size=len(alphabet), n_positions=CONTEXT,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=16,
                learning_rate=3e-3,
                max_steps=options.steps,
                logging_steps=20,
                ddp_find_unused_parameters=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        )
        trainer.train()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} workers, backend {dist.get_backend()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
