"""The mutants: one wrong line each, and the tests that are expected to fail with it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: what is wrong.
        path: the file, in the package.
        right: the text that is replaced; it is in the file once.
        wrong: what replaces it.
        tests: what finds it, from the fastest on: files or tests, from `tests/`.
    """

    name: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


SEQUENCE = ("parallel/sequence/test_tokens.py", "parallel/sequence/test_families_over_ranks.py")
LIMITS = ("parallel/pipefusion/test_limits.py", "parallel/pipefusion/test_simulation.py")
BATCH = ("parallel/batch/test_batch.py",)
TENSOR = ("parallel/tensor/test_tensor.py",)
VAE = ("parallel/vae/test_halo.py", "parallel/vae/test_vae.py")
CACHE = ("cache/test_cache_rules.py", "cache/test_cache_limits.py", "cache/test_cache_pipelines.py")

MUTANTS = (
    Mutant(
        "keys and values are swapped",
        "parallel/attention/core.py",
        "out = self._keys.attend_to_keys(q, k, v, keys,",
        "out = self._keys.attend_to_keys(q, v, k, keys,",
        ("parallel/attention/test_attention.py", *SEQUENCE),
    ),
    Mutant(
        "the mask is dropped",
        "parallel/attention/core.py",
        "if mask is not None and not keys.are_none:",
        "if mask is not None and keys.are_none:",
        ("parallel/attention/test_attention.py", *SEQUENCE),
    ),
    Mutant(
        "a patch is one row off",
        "plan/layout.py",
        "            ends.append(ends[-1] + rows)\n        return cls(grid, text, joint, tuple(ends))",
        "            ends.append(ends[-1] + rows)\n        ends[1] -= len(ends) > 2\n"
        "        return cls(grid, text, joint, tuple(ends))",
        ("plan/test_layout.py", *LIMITS),
    ),
    Mutant(
        "dummies of the text stand on the other side",
        "parallel/attention/core.py",
        "parts = [dummies, out] if tokens.dummies_first else [out, dummies]",
        "parts = [out, dummies] if tokens.dummies_first else [dummies, out]",
        ("parallel/sequence/test_tokens.py",),
    ),
    Mutant(
        "keys are said to be one step older",
        "model/hooks/kv_store.py",
        "age = None if written_step == NEVER else step - written_step",
        "age = None if written_step == NEVER else step - written_step + 1",
        ("model/hooks/test_kv_store.py", *LIMITS),
    ),
    Mutant(
        "a step of the warmup is stale",
        "plan/schedule.py",
        "return step < self.warmup or step in self.again",
        "return step + 1 < self.warmup or step in self.again",
        ("plan/test_schedule.py", *LIMITS),
    ),
    Mutant(
        "the fresh part of keys grows one patch late",
        "plan/schedule.py",
        "ages = [int(patch > last) for patch in range(self.patches)]",
        "ages = [int(patch >= last) for patch in range(self.patches)]",
        ("plan/test_schedule.py", *LIMITS),
    ),
    Mutant(
        "a stage computes a block of the next one",
        "parallel/pipefusion/executor.py",
        "        if index in self.owned:\n            return block(state)",
        "        if index in range(self.owned.start, self.owned.stop + 1):\n            return block(state)",
        LIMITS,
    ),
    Mutant(
        "denoised patches are not exchanged for the next step",
        "parallel/pipefusion/loop.py",
        "            if is_due:\n                self._exchange_latents(following)",
        "            if is_due and following.step < 1:\n                self._exchange_latents(following)",
        LIMITS,
    ),
    Mutant(
        "the sets of keys of a ring weigh the wrong way round",
        "parallel/sequence/ring.py",
        "torch.sigmoid(lse_b - lse_a)",
        "torch.sigmoid(lse_a - lse_b)",
        SEQUENCE,
    ),
    Mutant(
        "keys of a ring come in another order",
        "parallel/sequence/ring.py",
        "own = torch.stack([k, v])",
        "own = torch.stack([v, k])",
        ("parallel/pipefusion/test_limits.py", "runner/test_hybrids.py"),
    ),
    Mutant(
        "heads come back in another order",
        "parallel/sequence/ulysses.py",
        "        return torch.cat(parts, dim=2)\n\n    def select_own_heads",
        "        return torch.cat(parts[::-1], dim=2)\n\n    def select_own_heads",
        SEQUENCE,
    ),
    Mutant(
        "both halves compute the same branch of guidance",
        "parallel/batch/shares.py",
        "            group = self.index\n",
        "            group = 0\n",
        BATCH,
    ),
    Mutant(
        "images of replicas come in another order",
        "parallel/batch/shares.py",
        'return torch.cat([self._gather_images(own, LATENTS, "all") for own in copies])',
        'return torch.cat([self._gather_images(own, LATENTS, "all").flip(0) for own in copies])',
        BATCH,
    ),
    Mutant(
        "a bias is added once for each rank",
        "parallel/tensor/sharding.py",
        "    out = over_ranks(functional.linear(x, unpack_weight(linear)))\n",
        "    out = over_ranks(functional.linear(x, unpack_weight(linear), linear.bias))\n",
        TENSOR,
    ),
    Mutant(
        "a share of a weight in blocks begins within a block",
        "parallel/tensor/cuts.py",
        "        blocks, rest = divmod(part, row_blocks.numbers)\n",
        "        blocks, rest = part, 0\n",
        ("runner/test_gguf.py",),
    ),
    Mutant(
        "one factor of a LoRA is applied without the other",
        "runner/weights/lora_keys.py",
        "        if whole is None or _swap_factor(key) not in state:\n",
        "        if whole is None:\n",
        ("runner/test_lora_files.py",),
    ),
    Mutant(
        "partial products are not summed",
        "parallel/tensor/collectives.py",
        "            dist.all_reduce(staged, group=group)",
        "            dist.barrier(group=group)",
        TENSOR,
    ),
    Mutant(
        "a convolution lacks a row of its neighbour",
        "parallel/vae/halo.py",
        "        first = reach.start // self.scale\n",
        "        first = reach.start // self.scale + 1\n",
        VAE,
    ),
    Mutant(
        "rows of lower ranks are taken for rows of higher ones",
        "parallel/vae/halo.py",
        "side = above if peer < rank else below",
        "side = above if peer > rank else below",
        VAE,
    ),
    Mutant(
        "a cache never recomputes",
        "cache/step_rules.py",
        "return within_budget and (difference < limit or limit >= ALWAYS)",
        "return True",
        CACHE,
    ),
    Mutant(
        "a cache skips in its warmup",
        "cache/step_rules.py",
        "if record.computed is None or is_warmup:",
        "if record.computed is None:",
        CACHE,
    ),
    Mutant(
        "a step mask is one step off",
        "cache/step_rules.py",
        "if self.mask is not None and self.mask[place]:",
        "if self.mask is not None and self.mask[place - 1]:",
        CACHE,
    ),
    Mutant("skips in a row are not counted", "cache/step_rules.py", "        record.streak += 1\n", "", CACHE),
    Mutant(
        "a difference is not relative",
        "cache/unit_decision.py",
        "        return change / size\n",
        "        return change\n",
        ("cache/test_cache_limits.py", *CACHE),
    ),
    Mutant(
        "a forecast counts from the wrong step",
        "cache/forecast.py",
        "gaps = [end - computed_step for computed_step in steps[:-1]]",
        "gaps = [end - computed_step + 1 for computed_step in steps[:-1]]",
        ("cache/test_forecast.py",),
    ),
    Mutant(
        "what a plan forbids is let through",
        "plan/plan.py",
        "        if violations:\n            raise PlanError",
        "        if len(violations) > 9:\n            raise PlanError",
        ("plan/test_plan.py", "runner/test_refusals.py"),
    ),
    Mutant(
        "a batch that changes is let through",
        "parallel/pipefusion/executor.py",
        "if batch_size != now.batch and self.stages > 1:",
        "if batch_size != now.batch and self.stages > 9:",
        ("parallel/pipefusion/test_warmup.py",),
    ),
    Mutant(
        "the latents of step 0 are those of a rehearsal",
        "parallel/pipefusion/dry_iterations.py",
        "        rng_state.restore_generators(self._generators, self._random_states)\n",
        "",
        ("parallel/pipefusion/test_rehearsals.py", "parallel/pipefusion/test_loops.py"),
    ),
    Mutant(
        "replicas of a batch of prompts draw the first prompt",
        "parallel/batch/shares.py",
        "self.images = chunks[axis.index] or range(1)",
        "self.images = chunks[0] or range(1)",
        BATCH,
    ),
    Mutant(
        "one user's jobs keep the others waiting",
        "serve/queue.py",
        "        self._owners.move_to_end(owner)\n",
        "",
        ("serve/test_queue.py",),
    ),
    Mutant(
        "a bad value of an option is taken",
        "plan/option_classes.py",
        'config = ConfigDict(strict=True, extra="forbid")',
        'config = ConfigDict(strict=False, extra="ignore")',
        ("plan/test_flag_parser.py", "plan/test_plan.py", "cli/test_cli.py"),
    ),
    Mutant(
        "a tape reads the inputs of its first call",
        "model/recording/kept_tapes.py",
        "        if state != self._state or torch._C._is_cached_tensor(source):",
        "        if not self._state or torch._C._is_cached_tensor(source):",
        ("model/test_recorded_changes.py::test_an_input_is_copied_once_in_each_step",),
    ),
    Mutant(
        "stages cut by hand come in another order",
        "plan/stages.py",
        "_make_ranges(accumulate(by_hand))",
        "_make_ranges(accumulate(by_hand[::-1]))",
        ("plan/test_stages.py",),
    ),
    Mutant(
        "the slowest rank has the largest share",
        "planner/search.py",
        "stage_weights=_round_weights(stage_speeds),",
        "stage_weights=_round_weights(stage_speeds[::-1]),",
        ("plan/test_stages.py",),
    ),
    Mutant(
        "layers of a text encoder are not sent on",
        "parallel/text/encoders.py",
        "is_last_of_run = self._owners[index + 1 : index + 2] != [owner]",
        "is_last_of_run = index + 1 == len(self._owners)",
        ("parallel/text/test_text.py",),
    ),
    Mutant(
        "jobs of unlike sizes share a batch",
        "serve/queue.py",
        "describe_shape(job) == shape)",
        "describe_shape(job) is not None)",
        ("serve/test_queue.py::test_what_differs_is_drawn_alone",),
    ),
    Mutant(
        "a batch is larger than it may be",
        "serve/queue.py",
        "if num_images <= room:",
        "if num_images <= room + 1:",
        ("serve/test_queue.py::test_a_batch_is_as_large_as_it_may_be",),
    ),
    Mutant(
        "a restart fails jobs that have ended",
        "serve/store.py",
        "        if job.has_ended:",
        '        if job.state == "done":',
        ("serve/test_store.py",),
    ),
    Mutant(
        "a video that ends the server is begun for ever",
        "serve/store.py",
        "elif job.attempts >= MAX_ATTEMPTS:",
        "elif job.attempts >= 9 * MAX_ATTEMPTS:",
        ("serve/test_store.py",),
    ),
    Mutant(
        "the tenth input image comes before the second",
        "serve/store.py",
        "(len(name), name)",
        "name",
        ("serve/test_store.py",),
    ),
    Mutant(
        "a step pushes out a preview",
        "serve/job_state.py",
        "if watcher.pending and watcher.pending[-1].preview is None:",
        "if watcher.pending:",
        ("serve/test_service.py",),
    ),
    Mutant(
        "ranks do not compare the numbers of tensors",
        "model/fingerprint.py",
        'return f"{description} #{hash_bytes(plain.reshape(-1).view(torch.uint8).numpy())}"',
        "return description",
        ("runner/test_ranks_agree.py",),
    ),
    Mutant(
        "ranks do not compare the pixels of images",
        "model/fingerprint.py",
        'return f"{value.mode} image {list(value.size)} #{hash_bytes(value.tobytes())}"',
        'return f"{value.mode} image {list(value.size)}"',
        ("runner/test_ranks_agree.py",),
    ),
    Mutant(
        "a row of the table is used for other sources",
        "model/anatomies.py",
        'return source == compute_source_hash(transformer, row["lists"])',
        "return bool(source)",
        ("zoo/test_families.py::test_a_row_is_of_the_forwards_that_it_was_derived_from",),
    ),
    Mutant(
        "the first play of a tape is not compared",
        "model/recording/recorded_steps.py",
        "difference = first_play.find_difference(recording, made, watch.made)",
        'difference = ""',
        ("model/test_first_play.py",),
    ),
    Mutant(
        "an input is copied only where its version says so",
        "model/recording/recorded_steps.py",
        "moment = (now.memory.epoch, now.micro_step.step)",
        "moment = None",
        ("model/test_recorded_changes.py",),
    ),
)
