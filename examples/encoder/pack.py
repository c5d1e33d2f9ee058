"""Sentences with what they are about as sentences.jsonl, beside this file: `python examples/encoder/pack.py`."""

import json
import random
from pathlib import Path

WORDS = {
    "weather": ["rain", "sun", "cloud", "storm", "wind", "snow", "frost"],
    "kitchen": ["salt", "oven", "knife", "bread", "onion", "spoon", "butter"],
    "garden": ["hedge", "spade", "tulip", "lawn", "seed", "apple", "rake"],
}
FILLER = ["the", "a", "of", "and", "with", "over", "near", "some", "every", "old", "small", "red"]
draw = random.Random(0)
with Path(__file__).with_name("sentences.jsonl").open("w") as file:
    for _ in range(3000):
        topic = draw.choice(sorted(WORDS))
        words = draw.choices(FILLER, k=5) + draw.choices(WORDS[topic], k=2)
        draw.shuffle(words)
        file.write(json.dumps({"text": " ".join(words), "topic": topic}) + "\n")
