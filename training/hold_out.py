"""Write src/ditile/model/assets/captions.txt: 200 distinct captions that training skips: `python -m training.hold_out
--seed 1`.
"""

import argparse
import random
from pathlib import Path

from training.scenes import describe_scene, sample_scene

CAPTIONS = Path(__file__).parent.parent / "src" / "ditile" / "model" / "assets" / "captions.txt"


def held_out_captions(count: int, seed: int) -> list[str]:
    """Distinct held-out captions in the order they were drawn."""
    rng = random.Random(seed)
    captions: dict[str, None] = {}
    while len(captions) < count:
        captions[describe_scene(sample_scene(rng, held_out=True))] = None
    return list(captions)


def main() -> None:
    """Draw and write them."""
    parser = argparse.ArgumentParser(description="draw the held-out captions")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    CAPTIONS.write_text("\n".join(held_out_captions(args.count, args.seed)) + "\n")


if __name__ == "__main__":
    main()
