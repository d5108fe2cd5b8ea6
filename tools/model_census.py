"""Which causal LM types of the locked transformers are served, and why the others are refused.

``python tools/model_census.py`` prints a table for docs/models.md. Every type of transformers' mapping
is tried with the sizes that its own configuration class gives, on torch's meta device: no weights, no
network. A type whose default configuration cannot be built is told apart from a refused one.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

# Some of transformers' models take a while on the meta device, or more memory than they should.
WORKERS = 2


def judge(model_type: str) -> tuple[str, str]:
    """The type, and why it is refused: empty when it is served."""
    import transformers

    from plimsoll_engine.models.config import ARCHITECTURES, convert_config
    from plimsoll_engine.models.transformers_trial import try_model
    from plimsoll_engine.termination import EngineFailure

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.for_model(model_type)
    except Exception as error:  # noqa: BLE001 (any class of transformers may raise anything)
        return model_type, f"no default configuration ({type(error).__name__})"
    try:
        if model_type in ARCHITECTURES:
            convert_config(config)
        else:
            try_model(config)
    except EngineFailure as failure:
        return model_type, shorten(failure.message)
    return model_type, ""


def shorten(message: str) -> str:
    """The reason alone, without the type's name, figures and what is supported."""
    reason = re.sub(r"^the model's type \S+ (has )?", "", message.split("; supported: ")[0])
    return re.sub(r"\s*\(.*", "", reason).split(" [")[0][:60]


def count(model_types: Iterable[str]) -> dict[str, list[str]]:
    """Types by reason; under the empty one those that are served."""
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        for model_type, reason in pool.map(judge, sorted(model_types)):
            by_reason[reason].append(model_type)
    return dict(by_reason)


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    by_reason = count(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    served = by_reason.pop("", [])
    total = len(served) + sum(map(len, by_reason.values()))
    print(f"Of {total} types {len(served)} are served: {', '.join(served)}.\n")
    print("| refused for | types |\n|---|---|")
    for reason, types in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        print(f"| {reason} | {len(types)}: {', '.join(types)} |")


if __name__ == "__main__":
    sys.exit(main())
