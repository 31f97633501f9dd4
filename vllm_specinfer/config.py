"""The speculative config that vLLM carries for method specinfer.

Unpickled in engine and worker processes before any plugin is loaded there, so this
module needs vLLM but no hook.
"""

from dataclasses import field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import SkipValidation, ValidationError
from transformers import PretrainedConfig
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
from vllm.utils.hashing import safe_hash
from vllm.v1.spec_decode.dynamic.utils import (
    validate_and_normalize_dynamic_sd_schedule,
)

from vllm_specinfer.draft_heads import eagle_type, reads_layers
from vllm_specinfer.model_refusals import ranks_reason, ssm_reason
from vllm_specinfer.options import (
    BestFirstTree,
    SpecInferOptions,
    SSMSource,
)
from vllm_specinfer.refusals import refuse

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

logger = init_logger(__name__)

CPU_WORKER = "vllm_specinfer.cpu_worker.SpecInferCPUWorker"
GPU_WORKER = "vllm_specinfer.gpu_worker.SpecInferGPUWorker"


def worker_cls() -> str:
    """Path of the worker class for the current platform."""
    return CPU_WORKER if current_platform.is_cpu() else GPU_WORKER


@config
class SpecInferConfig(SpeculativeConfig):
    """A ``SpeculativeConfig`` whose drafts form a tree.

    vLLM sees method "draft_model" with N drafts: it then reserves N lookahead slots,
    keeps asynchronous scheduling and checks the vocabularies. The class is what marks
    specinfer. Build it with ``create``.
    """

    method: str | None = "draft_model"
    """Always "draft_model": another string switches features off inside vLLM."""
    options: SkipValidation[SpecInferOptions] = None  # type: ignore[assignment]
    """What the user asked for, defaults filled in."""
    ssm_model_configs: SkipValidation[tuple[ModelConfig, ...]] = ()
    """One model config per SSM, in their order."""
    linear_kernels: SkipValidation[list[str]] = field(default_factory=list)
    """In a worker on a CPU: what multiplies in each layer that was loaded."""

    verifies_with_plain_sampler: ClassVar[bool] = True
    """Every sampling parameter of plain decoding applies (hooks/sampling_params.py)."""

    @classmethod
    def create(
        cls,
        options: SpecInferOptions,
        target_model_config: ModelConfig,
        target_parallel_config: ParallelConfig,
    ) -> "SpecInferConfig":
        """Load the SSMs' configs and build the config for one target.

        Args:
            options: Parsed user options.
            target_model_config: The target's model config.
            target_parallel_config: The target's parallel config; its worker_cls is
                set.

        Returns:
            The config.

        Raises:
            ValueError: An SSM does not fit the target.
        """
        ssm_model_configs = tuple(
            build_ssm_model_config(source, target_model_config)
            for source in options.ssms
        )
        # Here, not in __post_init__: pydantic would wrap the sentences.
        for ssm in ssm_model_configs:
            refuse(ssm_reason(ssm, target_model_config))
            refuse(ranks_reason(ssm, target_parallel_config.tensor_parallel_size))
        heads = [ssm.model for ssm in ssm_model_configs if eagle_type(ssm)]
        if len(heads) > 1:
            raise ValueError(
                f"ssms must name at most one EAGLE head; got {', '.join(heads)}"
            )
        schedule = options.batch_schedule
        if schedule is not None:
            schedule = validate_and_normalize_dynamic_sd_schedule(list(schedule))
        return cls(
            options=options,
            num_speculative_tokens=options.num_speculative_tokens,
            num_speculative_tokens_per_batch_size=schedule,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
            ssm_model_configs=ssm_model_configs,
        )

    def __post_init__(self) -> None:
        # The parent's version guesses the method from the SSM's path ("eagle-...",
        # "dspark") and rewrites MTP-capable configs, so it must not run. Every line
        # below may run again: vLLM's replace() repeats it on a finished config.
        if self.options is None:
            raise ValueError(
                "SpecInferConfig must be built with SpecInferConfig.create"
            )
        self.method = "draft_model"
        # vLLM sees one model: the EAGLE head, whose class reads it here, else the
        # first SSM. Without one it sees the target, as with its own method "ngram".
        ssms = list(zip(self.options.ssms, self.ssm_model_configs, strict=True))
        ssms.sort(key=lambda pair: eagle_type(pair[1]) is None)
        shown, config = ssms[0] if ssms else (None, self.target_model_config)
        self.model = shown.model if shown else self.target_model_config.model
        self.revision = shown.revision if shown else None
        self.quantization = shown.quantization if shown else None
        self.draft_model_config = config
        self.draft_tensor_parallel_size = (
            self.target_parallel_config.tensor_parallel_size
        )
        if self.draft_parallel_config is None:  # type: ignore[has-type]
            self.draft_parallel_config = self.create_draft_parallel_config(
                self.target_parallel_config,
                self.draft_tensor_parallel_size,
                draft_model_config=self.draft_model_config,
            )
        self.target_parallel_config.worker_cls = worker_cls()

    def compute_hash(self) -> str:
        """As vLLM's, which looks at the method to see whether a head reads layers.

        Compiled SSMs hold the names of their layers, which are numbered, and compiled
        models what multiplies in them, which depends on the weights.
        """
        layers = getattr(
            self.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None
        )
        ssms = [ssm.model for ssm in self.options.ssms]
        factors = [super().compute_hash(), self.reads_layers, layers, ssms]
        factors.append(self.linear_kernels)
        return safe_hash(repr(factors).encode(), usedforsecurity=False).hexdigest()

    @property
    def reads_states(self) -> bool:
        """An EAGLE head reads the target's hidden states."""
        return eagle_type(self.draft_model_config) is not None

    @property
    def reads_layers(self) -> bool:
        """An EAGLE-3 head reads the states of some of the target's layers."""
        return reads_layers(self.draft_model_config)

    @property
    def source_names(self) -> tuple[str, ...]:
        """What metrics call the sources, in the order of their tests."""
        lookups = [
            source.name
            for source in self.options.sources
            if not isinstance(source, SSMSource)
        ]
        ssms = [
            f"ssm{number}" if eagle_type(config) is None else "head"
            for number, config in enumerate(self.ssm_model_configs)
        ]
        return (*lookups, *ssms)

    @property
    def follows_load(self) -> bool:
        """Nodes are admitted by what they bring and cost."""
        return self.static_reason is None

    @property
    def static_reason(self) -> str | None:
        """Why nodes do not follow the load, None where they do."""
        if self.options.scheduler == "static":
            return "the scheduler is 'static'"
        if not all(isinstance(tree, BestFirstTree) for tree in self.options.trees):
            return "the tree is an expansion"
        if (rule := self.options.verification_rule) not in ("coupled", "naive"):
            return f"a seeded text under {rule!r} depends on the tree"
        return None

    @property
    def summary(self) -> str:
        """One line on what is on, and why something is off."""
        paths = [f" ({ssm.model})" for ssm in self.options.ssms]
        paths = [""] * (len(self.options.sources) - len(paths)) + paths
        sources = map("".join, zip(self.source_names, paths, strict=True))
        nodes = "as many as pay"
        if self.options.scheduler == "learned":
            nodes += " by learned chances"
        if self.static_reason is not None:
            nodes = f"all in every step, because {self.static_reason}"
        trees = " and ".join(map(str, self.options.trees))
        return (
            f"sources {', '.join(sources)}; {trees}, at most "
            f"{self.num_speculative_tokens} nodes, {nodes}; verification "
            f"{self.options.verification_rule}"
        )

    def make_stat_logger(
        self, vllm_config: "VllmConfig", engine_indexes: list[int]
    ) -> "AggregateStatLoggerBase":
        """What counts the trees in the front end (hooks/stat_loggers.py)."""
        from vllm_specinfer.metrics import TreeStatLogger

        return TreeStatLogger(vllm_config, engine_indexes)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Of max_num_batched_tokens, what the scheduler keeps free for each request.

        None: passes of an SSM that would have more rows are several.
        """
        return 0

    def __repr__(self) -> str:
        return f"SpecInferConfig({self.options})"


def build_ssm_model_config(
    source: SSMSource, target_model_config: ModelConfig
) -> ModelConfig:
    """Build an SSM's model config, with the target's tokenizer, dtype and length.

    Args:
        source: The SSM.
        target_model_config: The target's model config.

    Returns:
        The SSM's model config; that of an EAGLE head names vLLM's class of the head.

    Raises:
        ValueError: The SSM cannot be read or is shorter than the target.
    """
    target = target_model_config
    overrides: Any = target.hf_overrides if callable(target.hf_overrides) else {}
    try:
        ssm = ModelConfig(
            model=source.model,
            runner="draft",
            tokenizer=target.tokenizer,
            tokenizer_mode=target.tokenizer_mode,
            tokenizer_revision=target.tokenizer_revision,
            trust_remote_code=target.trust_remote_code,
            dtype=target.dtype,
            seed=target.seed,
            revision=source.revision,
            quantization=source.quantization,
            spec_target_max_model_len=target.max_model_len,
            # It reads ids alone, those of images among them.
            language_model_only=True,
            enforce_eager=target.enforce_eager,
            max_logprobs=target.max_logprobs,
            hf_overrides=overrides,
            config_format=target.config_format,
            enable_sleep_mode=target.enable_sleep_mode,
            sleep_mode_backend=target.sleep_mode_backend,
            sleep_mode_offload_cudagraph=target.sleep_mode_offload_cudagraph,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model must be an SSM that vLLM can load; got {source.model!r}: "
            f"{_first_line(error)}"
        ) from error
    _name_head(ssm, source)
    text = ssm.hf_config
    if eagle_type(ssm) is not None and _any_positions(text):
        # A head runs at the target's positions whatever its config says, as in vLLM.
        text.max_position_embeddings = max(
            getattr(text, "max_position_embeddings", 0), target.max_model_len
        )
    elif (positions := _positions(ssm)) < target.max_model_len:
        raise ValueError(
            f"max_model_len must be at most the {positions:.0f} positions of the SSM "
            f"{source.model!r}; got {target.max_model_len}"
        )
    # The SSM sees exactly the target's positions, never more, so the limits agree.
    ssm.max_model_len = target.max_model_len
    return ssm


def _any_positions(config: PretrainedConfig) -> bool:
    """A model's positions only size a table (vLLM 0.33, config/speculative.py)."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layers = [of_type for of_type in rope.values() if isinstance(of_type, dict)]
    kinds = {of_type.get("rope_type", "default") for of_type in by_layers or [rope]}
    return kinds <= {"default", "linear", "llama3", "ntk", "proportional"}


def _positions(ssm: ModelConfig) -> float:
    """As many as a model has; where its rope is LongRoPE, vLLM's default is fewer."""
    derived, _ = ssm.model_arch_config.derived_max_model_len_and_key
    return max(ssm.max_model_len, derived)


def _name_head(ssm: ModelConfig, source: SSMSource) -> None:
    """Give the config of an EAGLE head the architecture that vLLM has for it.

    As vLLM does for its own methods (vllm/config/speculative.py, __post_init__).

    Raises:
        ValueError: The checkpoint is not of the type that was asked for.
    """
    found = eagle_type(ssm)
    wanted = source.type or found or "ssm"
    if found and wanted != found:
        raise ValueError(
            f"type must be that of the checkpoint {source.model!r}, {found!r}; got "
            f"{wanted!r}"
        )
    if wanted == "ssm" or isinstance(ssm.hf_config, EAGLEConfig | SpeculatorsConfig):
        return
    theirs = ssm.architectures
    ssm.hf_config = EAGLEConfig(ssm.hf_config, method=wanted, model_type="eagle")
    try:
        SpeculativeConfig.update_arch_(SimpleNamespace(draft_model_config=ssm))
    except ValueError as error:
        raise ValueError(
            f"type {wanted!r} must be one that vLLM has a class for; got {theirs} in "
            f"{source.model!r}"
        ) from error


def _first_line(error: Exception) -> str:
    """The message without pydantic's frame and without advice."""
    if isinstance(error, ValidationError):
        message = error.errors(include_url=False)[0]["msg"]
    else:
        message = str(error)
    return message.removeprefix("Value error, ").strip().split("\n")[0]
