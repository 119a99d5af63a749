"""How large a run of Qwen2.5-0.5B may be on one GPU: from its memory to batch sizes, by arithmetic only.

in: GiB of the GPU -> out: Sizes, or ValueError with the arithmetic where nothing fits.
Nothing here asks a GPU, so the table in tests/test_gpu_sizes.py is checked anywhere.
verl: none; there the user finds the sizes by trying
"""

from dataclasses import dataclass

GIB = 2**30
PARAMETERS = 494_032_768  # Qwen2.5-0.5B, its head tied to the embedding
LAYERS, KEY_VALUE_WIDTH, VOCABULARY = 24, 2 * 64, 151_936  # two key heads of 64

TRAINED = (
    4 + 4 + 8 + 2
)  # bytes a parameter: float32 weight, gradient, two Adam moments, bfloat16 copy (autocast)
HELD = 4  # a model that only scores or samples: the float32 weight
KEPT_PER_LAYER, KEPT_ASIDE = 66_368, 7_692  # bytes a token that autograd keeps, measured under autocast
KEPT_PER_TOKEN = LAYERS * KEPT_PER_LAYER + KEPT_ASIDE
KEPT_PER_ANSWER_TOKEN = 3 * 2 * VOCABULARY  # bfloat16 logits, a copy of them and their gradient
CACHE_PER_TOKEN = 2 * LAYERS * KEY_VALUE_WIDTH * 4  # keys and values, float32
SAMPLING_PER_ROW = 8 * 4 * VOCABULARY  # logits, probabilities, their sums and what sorting needs
USABLE = 0.9  # the rest: CUDA's context, fragments
PROMPT = 256
N = 8
MOST_PROMPTS = 128  # more makes a step long without making it better


@dataclass(frozen=True)
class Sizes:
    """One rank. `critic`: whether a second trained model fits beside the actor."""

    critic: bool
    response_length: int
    train_batch_size: int  # prompts
    micro_batch_size: int  # trajectories
    free_gib: float  # beside the models: activations while training, the cache while sampling

    @property
    def mini_batch_size(self) -> int:
        """Prompts; four optimizer steps a batch."""
        return self.train_batch_size // 4


def sizes(memory_gib: float) -> Sizes:
    """The largest of three plans that fits; powers of two, so that everything divides.

    Models: actor 18 bytes a parameter, critic 18, reference 4, rollout 4; with P = 0.494e9 that is 8.3, 8.3,
    1.8 and 1.8 GiB. What is left of 90% of the memory holds, at different times,
      - the micro-batch: a token 1.6 MB of activations, an answer token 0.9 MB of logits more, so a
        trajectory of 256 + 512 tokens 1.6 GiB, of 256 + 256 tokens 1.0 GiB;
      - the cache of all rows of the batch: a token 25 kB, twice as it is copied when it grows, and 4.9 MB a
        row for sampling, so 0.04 GiB a row of 256 + 512 tokens.
    Plans in order: critic and 512 answer tokens; no critic; no critic and 256 answer tokens.

    Raises:
        ValueError: not even the last fits.
    """
    for critic, response_length in ((True, 512), (False, 512), (False, 256)):
        free = USABLE * memory_gib * GIB - models_bytes(critic)
        micro = _power_of_two(free / trajectory_bytes(response_length))
        rows = _power_of_two(free / row_bytes(response_length))
        prompts = min(rows // N, MOST_PROMPTS)
        if micro >= 1 and prompts >= 4:
            return Sizes(critic, response_length, prompts, min(micro, prompts // 4 * N), free / GIB)
    held, one = models_bytes(False), trajectory_bytes(256)
    needed = (held + max(one, 4 * N * row_bytes(256))) / USABLE
    raise ValueError(
        f"a GPU of {memory_gib:.0f} GiB is too small for Qwen2.5-0.5B: models {held / GIB:.1f} GiB (actor "
        f"{TRAINED} bytes a parameter, reference and rollout {HELD} each), a trajectory of {PROMPT} + 256 "
        f"tokens {one / GIB:.1f} GiB, {USABLE:.0%} usable: it takes {needed / GIB:.1f} GiB"
    )


def models_bytes(critic: bool) -> int:
    return PARAMETERS * (TRAINED * (2 if critic else 1) + HELD + HELD)


def trajectory_bytes(response_length: int) -> int:
    """One trajectory in a micro-batch, forward and backward."""
    return (PROMPT + response_length) * KEPT_PER_TOKEN + response_length * KEPT_PER_ANSWER_TOKEN


def row_bytes(response_length: int) -> int:
    """One trajectory while it is sampled by the builtin rollout."""
    return 2 * (PROMPT + response_length) * CACHE_PER_TOKEN + SAMPLING_PER_ROW


def _power_of_two(number: float) -> int:
    """The largest one that is not above; 0 for a number below 1."""
    return 1 << (int(number).bit_length() - 1) if number >= 1 else 0
