"""The numbers that follow from the configuration and the number of ranks; computed once, never options.

prompts  --x rollout.n-->  sequences  --/ dp-->  a data rank  --/ mini-batches-->  an update  -->  micro-batches
"""

from __future__ import annotations

from dataclasses import dataclass

from fastgrpo.config.schema import RunConfig
from fastgrpo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Example: 32 prompts x 8 samples on 4 ranks, sp 1, tp 2, one update: sequences_per_step 256, dp 4, engines 2,
    sequences_per_rank 64."""

    world: int  # ranks
    ranks_per_node: int
    sp: int  # ranks that share one row of tokens
    tp: int  # ranks of one engine; 1 while that is open
    tp_is_open: bool  # not decided yet (fastgrpo/plan)
    replicas: int  # copies of the sharded model (HSDP)
    prompts_per_step: int
    samples_per_prompt: int
    prompts_per_update: int
    epochs_per_step: int  # passes over a rollout
    max_prompt_length: int  # tokens
    max_response_length: int  # tokens
    max_model_len: int  # tokens of the engine's longest sequence
    max_tokens_per_gpu: int | None  # None: not decided yet (fastgrpo/plan)
    max_sequences_per_micro_batch: int | None  # of one SP group

    @classmethod
    def of(cls, config: RunConfig, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """`ranks_per_node` defaults to all ranks on one node. Checks nothing: `rules.check` does."""
        data, actor, rollout = config.data, config.actor, config.rollout
        return cls(
            world=world_size,
            ranks_per_node=ranks_per_node or world_size,
            sp=actor.ulysses_sequence_parallel_size,
            tp=1 if rollout.tensor_model_parallel_size is None else rollout.tensor_model_parallel_size,
            tp_is_open=rollout.tensor_model_parallel_size is None,
            replicas=actor.fsdp.replicas,
            prompts_per_step=data.train_batch_size,
            samples_per_prompt=rollout.n,
            prompts_per_update=actor.ppo_mini_batch_size or data.train_batch_size,
            epochs_per_step=actor.ppo_epochs,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
            max_tokens_per_gpu=actor.max_tokens_per_gpu,
            max_sequences_per_micro_batch=actor.micro_batch_size_per_gpu,
        )

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node)

    @property
    def dp(self) -> int:
        """Ranks, or SP groups of ranks, that work on different sequences."""
        return self.world // self.sp

    @property
    def engines(self) -> int:
        return self.world // self.tp

    @property
    def shard(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.world // self.replicas

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def sequences_per_engine(self) -> int:
        """Of a step, at most: whole groups."""
        return -(-self.prompts_per_step // self.engines) * self.samples_per_prompt

    @property
    def sequences_per_update(self) -> int:
        return self.prompts_per_update * self.samples_per_prompt

    @property
    def sequences_per_rank(self) -> int:
        """Of a step, at most, for a data rank."""
        return -(-self.sequences_per_step // self.dp)

    @property
    def sequences_per_rank_and_update(self) -> int:
        """At most."""
        return -(-self.sequences_per_update // self.dp)

    @property
    def mini_batches(self) -> int:
        """Of one pass over the rollout."""
        return self.prompts_per_step // self.prompts_per_update

    @property
    def updates_per_step(self) -> int:
        return self.mini_batches * self.epochs_per_step

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and response of the longest sequence."""
        return self.max_prompt_length + self.max_response_length

    @property
    def tokens_per_micro_batch(self) -> int:
        """Bound on one row of packed tokens, which `sp` ranks share."""
        assert self.max_tokens_per_gpu is not None, "no token budget yet: the plan settles it"
        return self.max_tokens_per_gpu * self.sp

    def table(self) -> list[str]:
        """What the batch sizes mean, a line a layer, from a step down to one forward."""
        ranks = "GPU" if self.sp == 1 else f"group of {self.sp} GPUs"
        rows = [
            ("a step", self.prompts_per_step, "prompts", "data.train_batch_size"),
            ("", self.sequences_per_step, "sequences", f"x {self.samples_per_prompt} samples a prompt (rollout.n)"),
            ("an engine", _share(self.sequences_per_step, self.engines), "sequences", self._engines_in_words()),
            (f"a {ranks}", _share(self.sequences_per_step, self.dp), "sequences", f"over {self.dp} data ranks"),
            ("an update", self.prompts_per_update, "prompts", "actor.ppo_mini_batch_size"),
            ("", self.sequences_per_update, "sequences", f"{_share(self.sequences_per_update, self.dp)} a {ranks}"),
            ("updates a step", self.updates_per_step, "", self._updates_in_words()),
            self._budget_row(),
        ]
        if self.max_sequences_per_micro_batch:
            rows.append(("", self.max_sequences_per_micro_batch, "sequences at most", self._rounds_in_words()))
        return [f"{layer:<18}{number!s:>9}  {unit:<18}{note}".rstrip() for layer, number, unit, note in rows]

    def _engines_in_words(self) -> str:
        if self.tp_is_open and self.world > 1:
            return f"over {self.engines}, or more over fewer: rollout.tensor_model_parallel_size=null: the plan decides"
        return f"over {self.engines} = {self.world} ranks / {self.tp} (rollout.tensor_model_parallel_size)"

    def _updates_in_words(self) -> str:
        passes = "" if self.epochs_per_step == 1 else f" x {self.epochs_per_step} passes (actor.ppo_epochs)"
        return f"{self.mini_batches} mini-batch{'' if self.mini_batches == 1 else 'es'}{passes}"

    def _budget_row(self) -> tuple[str, int | str, str, str]:
        if self.max_tokens_per_gpu is None:
            return "a forward", "as many", "tokens as fit", "actor.max_tokens_per_gpu=null: the memory plan decides"
        shared = "" if self.sp == 1 else f" x {self.sp} (actor.ulysses_sequence_parallel_size)"
        fit = self.tokens_per_micro_batch // self.max_sequence_tokens
        note = f"actor.max_tokens_per_gpu{shared}: {fit} of the longest sequences ({self.max_sequence_tokens} tokens)"
        return "a forward", self.tokens_per_micro_batch, "tokens at most", note

    def _rounds_in_words(self) -> str:
        size = self.max_sequences_per_micro_batch or 1
        return (
            f"actor.micro_batch_size_per_gpu: {-(-self.sequences_per_rank_and_update // size)} rounds or more an update"
        )


def total_steps(config: RunConfig, num_prompts: int) -> int:
    """Steps of a run over `num_prompts` training prompts: trainer.max_steps, or trainer.total_epochs of whole batches.

    Raises ConfigError when the data do not fill one step.
    """
    steps_per_epoch = num_prompts // config.data.train_batch_size
    if steps_per_epoch == 0:
        raise ConfigError(
            f"0 batches: {num_prompts} training prompts do not fill one step of data.train_batch_size="
            f"{config.data.train_batch_size}; "
            + (f"set data.train_batch_size={num_prompts} or less, or give more data" if num_prompts else "give data")
        )
    return config.trainer.max_steps or config.trainer.total_epochs * steps_per_epoch


def _share(total: int, parts: int) -> str:
    low, high = total // parts, -(-total // parts)
    return str(low) if low == high else f"{low}-{high}"
