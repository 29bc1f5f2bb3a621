"""One training run: data, updates, checkpoints, evaluation; it may be cut at any time and goes on
where it was."""

import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from specbench import provenance, registry
from specbench.learned.checkpoint import CARD
from specbench.learned.vocabulary import frozen_head
from specbench.target import FINAL, Target, load_target
from specbench.target.loading import cache_folder
from specbench.training import state
from specbench.training.config import TrainConfig, choose, file_settings, recipe_of
from specbench.training.corpus import Corpus, Speed, Writer, corpus_name, write
from specbench.training.display import Display
from specbench.training.evaluation import held_out_tau
from specbench.training.features import Features
from specbench.training.prompts import Evaluated, source_prompts
from specbench.training.recipe import Options, Recipe
from specbench.training.state import Progress
from specbench.tree import Tree

_LOG = "log.jsonl"
_WARM_UP = 0.03
_LEAST_RATE = 0.05
_CLIP = 1.0
_SAVE_EVERY_S = 120.0
_WINDOW = 64
"""Sequences that are sorted by length together."""
_CALIBRATED = 40
"""Held-out sequences that a recipe is calibrated on."""


class Trainer:
    """Trains one method's drafter.

    Args:
        config: the settings.
        target: loaded.
        out: the folder of the run.
        display: told how it goes.

    Raises:
        ValueError: the target cannot be trained for, or not so.
    """

    def __init__(self, config: TrainConfig, target: Target, out: Path, display: Display) -> None:
        self.config, self.target, self.out, self.display = config, target, out, display
        self.method = registry.load_method(config.method)
        self.progress = Progress()
        check_target(target, config.max_new_tokens)
        self.evaluated = Evaluated()
        self.prompts = self._prompts()
        # What the target cannot have is said before the data are made.
        self._recipe(torch.ones(target.vocab_size, dtype=torch.long))

    def run(self) -> None:
        """Makes what data is missing, trains to the end, and writes the checkpoint."""
        corpus, features_folder = self._corpus()
        recipe = self._recipe(corpus.token_counts(self.target.vocab_size))
        features = Features(
            self.target,
            corpus,
            recipe.needed_taps(),
            features_folder,
            int(self.config.disk_gib * 2**30),
        )
        where = "kept on the disk" if features.kept else "computed each time: no room to keep them"
        self.display.say(
            f"hidden states: {features.num_bytes / 2**30:.2f} GiB, {where}; "
            f"{sum(p.numel() for p in recipe.module.parameters() if p.requires_grad) / 1e6:.2f} M "
            "parameters to train"
        )
        self._train(recipe, features, corpus)
        self._finish(recipe, features, corpus)

    def _prompts(self) -> list[str] | None:
        """What the target is asked; None for what it invents."""
        if self.config.prompts is None:
            return None
        prompts, dropped = source_prompts(self.config.prompts, self.evaluated)
        random.Random(self.config.seed).shuffle(prompts)
        self.display.say(f"{len(prompts)} prompts, {dropped} dropped: they overlap the workloads")
        return prompts

    def _corpus(self) -> tuple[Corpus, Path]:
        config = self.config
        name = corpus_name(self.target, f"{self.prompts} {config.seed}", config.max_new_tokens)
        folder = cache_folder() / "corpora" / name
        folder.mkdir(parents=True, exist_ok=True)
        writer = Writer(self.target, config.batch_size)
        with FileLock(folder / ".lock"):  # another run may be making the same
            corpus = Corpus(folder, self.target.vocab_size)
            self.display.say(
                f"corpus {folder}: {corpus.num_answered} tokens in {len(corpus)} answers"
            )
            write(
                corpus,
                writer,
                self.prompts,
                self.evaluated,
                num_tokens=config.tokens,
                num_new_tokens=config.max_new_tokens,
                seed=config.seed,
                display=self.display,
            )
        if writer.speed.tokens:
            self.display.say(
                f"generation: {writer.speed} at batch {config.batch_size}, "
                f"{writer.target_share:.0%} of the time in the target"
            )
        corpus.cut(config.tokens)
        return corpus, folder

    def _recipe(self, token_counts: torch.Tensor) -> Recipe:
        config = self.config
        torch.manual_seed(config.seed)
        options = Options(
            vocab=config.vocab,
            token_counts=token_counts,
            unroll=config.unroll,
            num_layers=config.layers,
            exit_layer=config.exit_layer,
        )
        return recipe_of(config.method)(self.target, options)

    def _train(self, recipe: Recipe, features: Features, corpus: Corpus) -> None:
        config, progress = self.config, self.progress
        parameters = [p for p in recipe.module.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(
            parameters, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        if state.load(recipe, optimiser, progress, self.out):
            self.display.say(f"going on after {progress.seconds / 60:.1f} minutes of training")
        rate = config.learning_rate or recipe.learning_rate
        total_s = 60 * config.minutes
        saved_s = evaluated_s = progress.seconds
        shown, in_target = _Mean(), features.seconds
        for batch in self._batches(corpus):
            if progress.seconds >= total_s:
                break
            begin = time.perf_counter()
            for group in optimiser.param_groups:
                group["lr"] = rate * schedule(progress.seconds / total_s)
            sequences = features.batch(batch)
            with self._autocast():
                loss, scalars = recipe.loss(sequences)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimiser.step()
            progress.updates += 1
            progress.tokens += sum(len(corpus.sequences[index].answer) for index in batch)
            shown.add({"loss": loss.detach()} | scalars)
            progress.seconds += time.perf_counter() - begin
            progress.target_seconds += features.seconds - in_target
            in_target = features.seconds
            self.display.move(progress.seconds / 60)
            if progress.seconds - evaluated_s >= 60 * config.evaluate_minutes:
                evaluated_s = progress.seconds
                self._show(shown)
                shown = _Mean()
                self._evaluate(recipe, features, corpus)
            if progress.seconds - saved_s >= _SAVE_EVERY_S:
                saved_s = progress.seconds
                self._show(shown)
                state.save(recipe, optimiser, progress, self.out)
                shown = _Mean()
        self._show(shown)
        state.save(recipe, optimiser, progress, self.out)

    def _batches(self, corpus: Corpus) -> Iterator[list[int]]:
        """Indices of sequences for one update after another, without end."""
        if not corpus.indices(held_out=False):
            raise ValueError("the corpus has no sequence to train on; ask for more --tokens")
        progress = self.progress
        while True:
            batches = self._epoch(corpus)
            while progress.place < len(batches):
                progress.place += 1
                yield batches[progress.place - 1]
            progress.epoch, progress.place = progress.epoch + 1, 0

    def _epoch(self, corpus: Corpus) -> list[list[int]]:
        """All sequences to train on once, in an order of the epoch's own; those of like length
        stand together, so that little is padded."""
        shuffle = random.Random(f"{self.config.seed} {self.progress.epoch}")
        indices = corpus.indices(held_out=False)
        shuffle.shuffle(indices)
        batches = []
        for begin in range(0, len(indices), _WINDOW):
            size = self.config.batch_tokens
            lengths = {i: len(corpus.sequences[i].tokens) for i in indices[begin : begin + _WINDOW]}
            for index in sorted(lengths, key=lengths.__getitem__):
                if size >= self.config.batch_tokens:
                    batches.append(list[int]())
                    size = 0
                batches[-1].append(index)
                size += lengths[index]
        shuffle.shuffle(batches)
        return batches

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.target.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.target.device.type, self.target.dtype)

    def _evaluate(self, recipe: Recipe, features: Features, corpus: Corpus) -> None:
        """Writes a checkpoint and decodes a few prompts of every workload with it."""
        self._write(recipe, features, corpus)
        config = registry.make_config(
            self.config.method, self.method, {self.method.weights_knob: str(self.out)}
        )
        self.progress.tau = held_out_tau(self.target, self.method(self.target, config))
        self.display.say("tau: " + ", ".join(f"{k} {v:.2f}" for k, v in self.progress.tau.items()))

    def _write(self, recipe: Recipe, features: Features, corpus: Corpus) -> None:
        held_out = corpus.indices(held_out=True)[:_CALIBRATED]
        with torch.no_grad(), self._autocast():
            recipe.calibrate(features.batch([index]) for index in held_out)
        recipe.write(self.out)

    def _finish(self, recipe: Recipe, features: Features, corpus: Corpus) -> None:
        self._evaluate(recipe, features, corpus)
        progress = self.progress
        weights = sorted(self.out.glob("*.safetensors"))
        card = {
            "command": self.config.command,
            "method": self.config.method,
            "target": self.target.name,
            "target_weights_sha256": self.target.fingerprint,
            "settings": dataclasses.asdict(self.config),
            "corpus": {
                "prompts": self.config.prompts or "invented by the target",
                "answers": len(corpus),
                "answer_tokens": corpus.num_answered,
            },
            "training": {
                "minutes": round(progress.seconds / 60, 1),
                "updates": progress.updates,
                "tokens_learned_from": progress.tokens,
                "tokens_per_second": round(progress.tokens / max(progress.seconds, 1e-9), 1),
                "target_share": round(progress.target_seconds / max(progress.seconds, 1e-9), 3),
            },
            "held_out_tau": progress.tau,
            "provenance": provenance.collect() | provenance.machine(),
            "sha256": {path.name: sha256(path.read_bytes()).hexdigest() for path in weights},
        }
        (self.out / CARD).write_text(json.dumps(card, indent=2) + "\n")
        self.display.say(f"the checkpoint is in {self.out}")

    def _show(self, shown: "_Mean") -> None:
        """Says and files how it goes.

        Raises:
            ValueError: the loss is no number; what was saved before is still good.
        """
        progress = self.progress
        if not shown.count:
            return
        means = shown.means()
        if not math.isfinite(means["loss"]):
            raise ValueError(f"the loss is {means['loss']} at update {progress.updates}")
        speed = Speed(progress.tokens, progress.seconds)
        line = {
            "minutes": round(progress.seconds / 60, 2),
            "updates": progress.updates,
            "epoch": progress.epoch,
            "tokens_per_s": round(speed.tokens / speed.seconds, 1),
            **means,
            "tau": progress.tau,
        }
        with (self.out / _LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")
        numbers = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
        minutes = round(progress.seconds / 60, 1)
        text = f"{progress.updates} updates, {speed}: {numbers}"
        self.display.show("training", minutes, self.config.minutes, "minutes", text)


@torch.inference_mode()
def check_target(target: Target, num_new_tokens: int) -> None:
    """Holds a target to what the recipes take for granted.

    Raises:
        ValueError: answers do not fit into its context, or its logits are not what its head makes
        of the last hidden state.
    """
    if num_new_tokens >= target.max_context - 1:
        raise ValueError(
            f"--max-new-tokens {num_new_tokens} leaves no room for a prompt in the context of "
            f"target {target.name!r}; valid: 1..{target.max_context - 2}"
        )
    cache = target.new_cache(1, 16)
    cache.add_row()
    tokens_1N = torch.arange(1, 5)[None] % target.vocab_size
    found = target.forward(tokens_1N, [Tree.chain(3)], cache, taps=[FINAL])
    head = frozen_head(target, torch.arange(target.vocab_size))
    logits_NV = head(found.taps[FINAL][0].to(head.weight.dtype)).float()
    apart = (logits_NV.softmax(-1) - found.logits_BMV[0].float().softmax(-1)).abs().sum(-1) / 2
    if apart.max() > 0.05:
        raise ValueError(
            f"target {target.name!r} scales or caps the logits of its head; drafters for such a "
            "target cannot be trained here"
        )


class _Mean:
    """Means of scalars over updates, without waiting for a device at each."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.count = 0

    def add(self, scalars: dict[str, torch.Tensor]) -> None:
        self.count += 1
        for name, value in scalars.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value

    def means(self) -> dict[str, float]:
        return {name: round(float(total) / self.count, 4) for name, total in self.sums.items()}


def schedule(done: float) -> float:
    """The learning rate's share of its height when a share of the run is done: a linear start, then
    half a cosine."""
    if done < _WARM_UP:
        return max(done / _WARM_UP, 0.02)
    angle = math.pi * min(1.0, (done - _WARM_UP) / (1 - _WARM_UP))
    return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(angle)) / 2


def open_run(given: Mapping[str, Any], out: Path, resume: bool, display: Display) -> Trainer:
    """A training run in a new folder, or the one that is in a folder: see `choose`.

    Raises:
        ValueError: as `choose`, or the target cannot be loaded.
    """
    config = choose(given, out, resume)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(config.target, dtype=config.dtype, device=device)
    trainer = Trainer(config, target, out, display)
    file_settings(config, out)
    return trainer
