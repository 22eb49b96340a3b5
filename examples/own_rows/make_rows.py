"""Write rows.jsonl: 1,999 words, each with its letters in alphabetical order and with somebody's draft of that."""

import json
import random
import string

choice = random.Random(0)
words = {"".join(choice.choices(string.ascii_lowercase, k=5)): None for _ in range(2000)}
with open("rows.jsonl", "w") as file:
    for word in words:
        answer = "".join(sorted(word))
        draft = choice.choice([answer, answer[::-1], word])  # one in three is right
        file.write(json.dumps({"question": f"{word}=", "answer": answer, "draft": draft}) + "\n")
