"""Draw random lengths for queries and responses."""

import numpy as np


class LengthSampler:
    """Draw a length uniformly from the integers min_value … max_value − 1 at each call."""

    def __init__(self, min_value: int, max_value: int) -> None:
        if not 1 <= min_value < max_value:
            raise ValueError(
                f"LengthSampler({min_value}, {max_value}) has no lengths to draw. Choose 1 ≤ "
                "min_value < max_value; max_value is exclusive."
            )
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))
