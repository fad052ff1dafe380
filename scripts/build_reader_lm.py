"""Build the embedded language model that reads: the embedded model's size and tokenizer, and exercises in looking up.

It is taught to answer in the right format with random actions, as the embedded model is, and beside that to say what
stands in a text: where a thing is, what is at a place. No exercise has a goal to reach, so it prefers no action either.

Three heads of its first layer look one, two and three tokens back before it has read anything. Without that ten minutes
of exercises taught it half of the answers: it found the colour or the kind of a thing and not both.

    python scripts/build_reader_lm.py --output assets/reader-lm --seed 0
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from build_tiny_lm import ASSETS, GRAMMAR, bucket, build_model, conversation, pad, say
from torch import Tensor

from lrl.prompts.template import Message

OFFSETS = (1, 2, 3)
"""Tokens that heads 0, 1 and 2 of the first layer look back."""
WAVES = 5
"""Of RoPE's, the fastest, that they do it with."""
SHARPNESS = 60.0
"""Of that look: with 60 the neighbours get less than a thousandth."""

# -- exercises --------------------------------------------------------------------------------------------------------


def _steps(number: int, side: str) -> str:
    return f"{number} step{'s' if number > 1 else ''} {side}"


def room(rng: random.Random) -> tuple[str, list[tuple[str, str, str]]]:
    """What is seen, and ``(thing, place as it stands there, place in short)`` of all of it."""
    names = [f"{color} {kind}" for color in GRAMMAR["color"] for kind in GRAMMAR["object"]]
    places = [(side, ahead) for side in range(-3, 4) for ahead in range(7) if (side, ahead) != (0, 0)]
    count = rng.randint(1, 6)
    lines, found = [], []
    for name, (aside, ahead) in zip(rng.sample(names, count), rng.sample(places, count), strict=True):
        parts = [(abs(aside), "right" if aside > 0 else "left")] * bool(aside) + [(ahead, "forward")] * bool(ahead)
        place = " and ".join(_steps(*part) for part in parts)
        found.append((name, place, " ".join(f"{number} {side}" for number, side in parts)))
        lines.append(f"You see a {name} {place}")
    lines += [f"You see a wall {_steps(rng.randint(1, 6), side)}" for side in ("forward", "left") if rng.random() < 0.3]
    if rng.random() < 0.2:
        lines.insert(0, f"You carry a {rng.choice(names)}")
    if rng.random() < 0.7:
        wanted = found[0][0] if rng.random() < 0.7 else rng.choice(names)
        lines.insert(0, f"Goal: {rng.choice(('go to', 'pick up'))} {rng.choice(('the', 'a'))} {wanted}")
        rng.shuffle(found)
    return "\n".join(lines), found


def where(rng: random.Random) -> tuple[str, str]:
    """Where things are, in whatever order: with a goal, first that of the thing it names."""
    seen, found = room(rng)
    short = rng.random() < 0.8
    places = {name: brief if short else place for name, place, brief in found}
    asked = rng.choices(list(places), k=6)
    goal = seen.split("\n")[0]
    if goal.startswith("Goal:"):
        asked = [" ".join(goal.split(" ")[-2:]), *asked]
    elif rng.random() < 0.5:
        asked.insert(rng.randrange(7), say(rng, "{color} {object}"))
    start = "see " if rng.random() < 0.5 else ""
    return seen, start + ", ".join(f"{name} {places[name]}" if name in places else f"no {name}" for name in asked)


def what(rng: random.Random) -> tuple[str, str]:
    """What is at a place."""
    seen, found = room(rng)
    return seen, ", ".join(f"{brief}: {name}" for name, _, brief in rng.choices(found, k=5))


EXERCISES: dict[Callable[[random.Random], tuple[str, str]], int] = {where: 7, what: 1}
"""And how often each is drawn."""


def exercise(rng: random.Random) -> list[Message]:
    """One question that a text answers."""
    seen, answer = rng.choices(list(EXERCISES), list(EXERCISES.values()))[0](rng)
    return [{"role": "user", "content": seen}, {"role": "assistant", "content": answer}]


# -- weights ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def look_back(model: Any) -> None:
    """Let heads of the first layer attend :data:`OFFSETS` tokens back.

    All embeddings get a common part c, from which queries and keys are made: ``q = sum_f exp(-i w_f d)``, ``k = 1`` for
    the fastest waves w_f of RoPE, so that the score at distance D is ``sum_f cos(w_f (D - d))``, greatest at d.
    """
    config, table = model.config, model.get_input_embeddings().weight
    half = config.head_dim // 2
    common = torch.nn.functional.normalize(torch.randn(config.hidden_size), dim=0)
    table += 2 * table.norm(dim=1).mean() * common
    share = (torch.nn.functional.normalize(table, dim=1) @ common).mean() * math.sqrt(config.hidden_size)
    waves = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    heard = (torch.arange(half) < WAVES) * math.sqrt(SHARPNESS)
    attention = model.model.layers[0].self_attn
    for head, offset in enumerate(OFFSETS):
        rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
        query = torch.cat([torch.cos(waves * offset) * heard, -torch.sin(waves * offset) * heard])
        key = torch.cat([heard, torch.zeros(half)])
        attention.q_proj.weight[rows] = torch.outer(query, common) / share
        attention.k_proj.weight[rows] = torch.outer(key, common) / share


def batches(tokenizer: Any, seed: int, steps: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As of ``build_tiny_lm.py``; most conversations are exercises."""
    rng = random.Random(f"reading {seed}")
    ready: list[list[list[int]]] = []
    for _ in range(steps):
        if not ready:
            chats = [exercise(rng) if rng.random() < 0.85 else conversation(rng) for _ in range(4000)]
            texts = tokenizer.apply_chat_template(chats, tokenize=False)
            ready = bucket(tokenizer(texts, add_special_tokens=False)["input_ids"], tokens)
            rng.shuffle(ready)
        yield pad(ready.pop(), tokenizer)


def train(model: Any, stream: Iterator[tuple[Tensor, Tensor]], steps: int, every: int = 50) -> None:
    """Supervise the answers' tokens only: Muon for the layers' matrices, AdamW for the rest, in bfloat16."""
    layers = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    known = {id(weight) for weight in layers}
    rest = [weight for weight in model.parameters() if id(weight) not in known]
    optimizers = (
        torch.optim.Muon(layers, lr=6e-3, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        for optimizer in optimizers
    ]
    started, right = time.perf_counter(), []
    for step, (ids, answers) in enumerate(stream):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            asked = answers[:, 1:]
            logits = model.lm_head(hidden[asked]).float()
        target = ids[:, 1:][asked]
        loss = torch.nn.functional.cross_entropy(logits, target)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        right.append(float((logits.argmax(-1) == target).float().mean()))
        if step % every == 0 or step == steps - 1:
            mean, right = sum(right) / len(right), []
            passed = time.perf_counter() - started
            print(f"step {step:5d}  loss {loss.item():.4f}  tokens right {mean:.3f}  {passed:6.1f} s", flush=True)


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, count: int = 200) -> float:
    """Share of new rooms whose places all hold the likeliest numbers, given what was said before."""
    rng, right = random.Random("unseen rooms"), 0
    for _ in range(count):
        seen, answer = where(rng)
        chat = [{"role": "user", "content": seen}, {"role": "assistant", "content": answer}]
        ids, answers = pad([tokenizer.apply_chat_template(chat)["input_ids"]], tokenizer)
        likeliest = model(ids[:, :-1]).logits.argmax(-1)
        numerals = torch.tensor([[token.isdigit() for token in tokenizer.convert_ids_to_tokens(ids[0, 1:])]])
        asked = answers[:, 1:] & numerals
        right += bool((likeliest == ids[:, 1:])[asked].all())
    return right / count


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and save everything."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("assets/reader-lm"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch_tokens", type=int, default=5000)
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    model = build_model(tokenizer, options.seed)
    model.set_attn_implementation("eager")
    look_back(model)
    train(model, batches(tokenizer, options.seed, options.steps, options.batch_tokens), options.steps)
    model.generation_config.do_sample = True
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"all numbers right in {accuracy(model, tokenizer):.3f} of new rooms")


if __name__ == "__main__":
    main()
