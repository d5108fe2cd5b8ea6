"""Which causal LM types of the locked transformers are served, and why the others are refused.

``python tools/model_census.py`` prints docs/model-types.md. Every type of transformers' mapping
is tried with the sizes that its own configuration class gives, on torch's meta device: no weights, no
network. A type whose default configuration cannot be built is told apart from a refused one.
"""

from __future__ import annotations

import multiprocessing
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version

# Some of transformers' models take a while on the meta device, or more memory than they should.
WORKERS = 2
UNJUDGED = "not judged: its own code cannot run its default configuration"


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
        return model_type, shorten(f"no default configuration ({error})")
    try:
        if model_type in ARCHITECTURES:
            convert_config(config)
        else:
            try_model(config)
    except EngineFailure as failure:
        return model_type, shorten(failure.message)
    return model_type, ""


# What a refusal says, and how the table has it.
REASONS = {
    r"more parts than one decoder": "more parts than one decoder (vision, speech, encoders)",
    r"state beside keys and values": "state beside keys and values",
    r"no support for transformers' attention interface": "no support for the attention interface",
    r"attention to later tokens": "attention to later tokens",
    r"queries .* and values": "values of another size than keys",
    r"layers of the type": "layers of another kind than full or sliding attention",
    r"layers of different shapes": "layers of different shapes",
    r"layers, of which these attend": "layers that do not attend once each",
    r"in its attention|a mask of its own|a window in its mask": "a mask, bias or sink of its own",
    r"sizes alone \((TypeError|KeyError|AttributeError)": UNJUDGED,
    r"sizes alone \(": "steps that depend on values",
    r"no default configuration": UNJUDGED,
}


def shorten(message: str) -> str:
    return next(reason for told, reason in REASONS.items() if re.search(told, message))


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
    served, unjudged = by_reason.pop("", []), by_reason.get(UNJUDGED, [])
    total = len(served) + sum(map(len, by_reason.values()))
    print("# Model types\n")
    told = (
        f"Of the {total} causal LM types of transformers {version('transformers')}, {len(served)} are "
        f"served, {total - len(served) - len(unjudged)} are refused by name and {len(unjudged)} are not "
        "judged. Each was tried with its default configuration, on shapes alone: a checkpoint with "
        "other settings is judged anew when it is loaded. Served means admitted by the trial of "
        "[models.md](models.md), which says what was really run."
    )
    print(textwrap.fill(told, 118))
    print("\n`python tools/model_census.py > docs/model-types.md` writes this page.\n")
    print("| verdict | number | types |\n|---|---|---|")
    rows = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    for reason, types in [("served", served), *rows]:
        print(f"| {reason} | {len(types)} | {', '.join(types)} |")


if __name__ == "__main__":
    main()
