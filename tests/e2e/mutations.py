"""Wrong rules and rare events that a job puts into its engine."""

import contextlib
import json
import os
import random
import time
from pathlib import Path
from unittest import mock


def mutation(name: str | None) -> contextlib.AbstractContextManager:
    """One wrong rule or rare event put into the engine."""
    if name is None:
        return contextlib.nullcontext()
    import numpy as np
    from vllm.logger import init_logger
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_specinfer import model_state, speculator
    from vllm_specinfer.drafting import children
    from vllm_specinfer.drafting.eagle import EagleHead
    from vllm_specinfer.drafting.neural import NeuralSource
    from vllm_specinfer.drafting.sources import SourceSet
    from vllm_specinfer.kernels.cpu import sampling
    from vllm_specinfer.scheduling import budget_memory
    from vllm_specinfer.scheduling.budget import Budget
    from vllm_specinfer.scheduling.load_budget import LoadBudget
    from vllm_specinfer.scheduling.scheduler import SpecInferScheduler
    from vllm_specinfer.tree import table
    from vllm_specinfer.tree.candidates import Candidates
    from vllm_specinfer.tree.proposals import NO_DRAW, Draws
    from vllm_specinfer.tree.table import StepPlan
    from vllm_specinfer.tree.token_tree import chain_bits
    from vllm_specinfer.verify import bare_draws, sampler, stochastic

    init_logger(__name__).warning("mutation: %s", name)

    def causal_mask(plan: StepPlan, num_rows: int) -> np.ndarray:
        bits = np.zeros((num_rows, plan.table.bits.shape[2]), np.int64)
        for i in plan.tree_requests:
            start, rows = plan.query_start_loc[i], plan.num_rows[i]
            bits[start : start + rows] = chain_bits(rows, bits.shape[1])
        return bits

    def flat_positions(plan: StepPlan) -> np.ndarray:
        starts = plan.query_start_loc[: len(plan.slots) + 1]
        first = plan.root_positions - starts[:-1]
        return np.arange(starts[-1]) + np.repeat(first, np.diff(starts))

    def parents_token_as_bonus(self, batch, emitted, levels):
        emitted = [[*tokens[:-1], tokens[-2:][0]] for tokens in emitted]
        return output(self, batch, emitted, levels)

    def changed_draws(change):
        """Children whose draws `change` has put something else into."""

        def wrong(self, logprobs, tokens, num_children, rows):
            found = choose(self, logprobs, tokens, num_children, rows)
            if found.draws is not None:
                for f in range(len(found.tokens)):
                    change(found, f)
            return found

        return lambda: mock.patch.object(children.ChildChooser, "choose", wrong)

    def drop_duplicates(found, f):
        repeated = np.isneginf(found.scores[f])
        found.draws.places[f][repeated] = NO_DRAW

    def take_the_likeliest(found, f):
        k = found.draws.places.shape[1]
        order = np.argsort(-found.draws.q[f, 0], kind="stable")[:k]
        found.draws.places[f] = order
        found.tokens[f] = found.draws.tokens[f][order]

    def drop_unlikely(found, f):
        places = found.draws.places[f]
        places[found.draws.q[f, 0, places] < 0.2] = NO_DRAW
        found.scores[f][places == NO_DRAW] = -np.inf
        # Tests stop at the first gap.
        kept = [p for p in places if p != NO_DRAW]
        places[:] = kept + [NO_DRAW] * (len(places) - len(kept))

    def keep_the_first_q(found, f):
        found.draws.q[f] = found.draws.q[f, 0]

    def drop_what_another_source_drew(draws):
        seen, kept = set(), []
        for d in draws:
            drawn = d.tokens[0, d.places[0]].tolist()
            columns = [j for j, token in enumerate(drawn) if token not in seen]
            kept.append(Draws(d.places[:, columns], d.tokens, d.q[:, columns]))
            seen.update(drawn)
        return joined(kept)

    def ssms_sit_out_the_first_request():
        started = []

        def count(self, slot, request):
            started.append(slot)
            start(self, slot, request)

        return mock.patch.multiple(
            SourceSet,
            start=count,
            _asks_ssms=lambda self, *args: len(started) > 1 and asks(self, *args),
        )

    def no_stock_attention():
        def refuse(*args, **kwargs):
            raise AssertionError("vLLM's attention kernel was called")

        return mock.patch.object(cpu_attn.ops, "cpu_attention_with_kv_cache", refuse)

    def record_drafts():
        found = []

        def recorded(self, step, *args):
            proposal = begin(self, step, *args)()
            candidates = proposal.candidates
            for r, i in enumerate(step.growing):
                known = step.all_token_ids[step.slots[i], : step.num_tokens[i]]
                columns = candidates.tokens, candidates.parents, candidates.scores
                found.append([known.tolist(), *(c[r].tolist() for c in columns)])
            Path(os.environ["RECORDED_DRAFTS"]).write_text(json.dumps(found))
            return lambda: proposal

        return mock.patch.object(NeuralSource, "begin", recorded)

    def trees_of_any_size():
        """The scheduler gets all of a tree, a few nodes or none."""
        rng = random.Random(0)

        def cut(self, drafts):
            for i, tree in enumerate(drafts.draft_token_ids):
                size = rng.choice([0, len(tree) // 4, len(tree)])
                drafts.draft_token_ids[i] = tree[:size]
                drafts.parents[i] = drafts.parents[i][:size]
            update(self, drafts)

        return mock.patch.object(SpecInferScheduler, "update_draft_token_ids", cut)

    @contextlib.contextmanager
    def rows_without_their_path():
        nobody = lambda _, slots: np.zeros(len(slots), bool)  # noqa: E731
        with (
            mock.patch.object(sampler, "looks_back", nobody),
            mock.patch.object(bare_draws.BareDraws, "suffice", lambda *_: False),
        ):
            yield

    def drafts_take_a_second():
        def slow(self):
            time.sleep(1)
            return draft(self)

        return mock.patch.object(speculator.TreeSpeculator, "draft", slow)

    @contextlib.contextmanager
    def draft_and_save_every_step():
        always = {n: getattr(Budget, n) for n in ("drafts", "worth", "least_score")}
        with (
            mock.patch.object(budget_memory, "SAVE_STEPS", 1),
            mock.patch.multiple(LoadBudget, **always),
        ):
            yield

    begin = NeuralSource.begin
    draft = speculator.TreeSpeculator.draft
    update = SpecInferScheduler.update_draft_token_ids
    start, asks = SourceSet.start, SourceSet._asks_ssms
    joined = table.joined
    choose = children.ChildChooser.choose
    output = sampler.TreeSampler._output
    draw = sampling.noised_argmax
    return {
        "mask": lambda: mock.patch.object(StepPlan, "ancestor_bits", causal_mask),
        "position": lambda: mock.patch.object(StepPlan, "positions", flat_positions),
        "commit": lambda: mock.patch.object(
            model_state.TreeModelState, "commit", lambda *args: None
        ),
        "look_back": rows_without_their_path,
        "noise": lambda: mock.patch.object(
            sampling,
            "noised_argmax",
            lambda logits, temperatures, seeds, positions: draw(
                logits, temperatures, seeds, 0 * positions
            ),
        ),
        "chain_grammar": lambda: mock.patch.object(
            SpecInferScheduler,
            "get_grammar_bitmask",
            Scheduler.get_grammar_bitmask,
        ),
        "bonus": lambda: mock.patch.object(
            sampler.TreeSampler, "_output", parents_token_as_bonus
        ),
        "trees_of_any_size": trees_of_any_size,
        "slots_are_kept": lambda: mock.patch.object(
            SpecInferScheduler, "schedule", Scheduler.schedule
        ),
        "duplicates_dropped": changed_draws(drop_duplicates),
        "likeliest_children": changed_draws(take_the_likeliest),
        "only_kept_children": changed_draws(drop_unlikely),
        "hopeless_trees_dropped": lambda: mock.patch.object(
            Candidates, "raised", lambda self, *args: self
        ),
        "q_not_updated": changed_draws(keep_the_first_q),
        "duplicates_across_sources_dropped": lambda: mock.patch.object(
            table, "joined", drop_what_another_source_drew
        ),
        "ssms_sit_out_the_first_request": ssms_sit_out_the_first_request,
        "no_stock_attention": no_stock_attention,
        "record_drafts": record_drafts,
        "drafts_take_a_second": drafts_take_a_second,
        "draft_and_save_every_step": draft_and_save_every_step,
        "states_lost": lambda: mock.patch.object(EagleHead, "_add", lambda *args: None),
        "shared_uniforms": lambda: mock.patch.object(
            children, "DRAFT_NOISE_SALT", stochastic.TEST_SALT
        ),
    }[name]()
