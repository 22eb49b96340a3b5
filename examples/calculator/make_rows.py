"""Write rows.jsonl: 3,000 word problems. `calculation` is what the supervised steps learn, see README.md."""

import json
import random

PROBLEMS = {
    "A shop has {a} boxes of {b} pencils and sells {c} pencils. How many pencils are left?": "{a}*{b}-{c}",
    "Ana saves {a} dollars a week for {b} weeks and had {c} dollars before. How many has she now?": "{a}*{b}+{c}",
    "Each of {a} schools has {b} girls and {c} boys in its choir. How many children sing?": "{a}*({b}+{c})",
    "A farmer plants {a} rows of {b} apple trees and {c} rows of {d} pear trees. How many is that?": "{a}*{b}+{c}*{d}",
    "A hall has {a} rows of {b} seats, and {c} of the rows are taken. How many seats are free?": "({a}-{c})*{b}",
    "{a} crates of {b} kg each stand on a truck of {c} kg. How many kg is that in all?": "{a}*{b}+{c}",
}

chance = random.Random(0)
with open("rows.jsonl", "w") as file:
    for number in range(3000):
        question, expression = chance.choice(list(PROBLEMS.items()))
        values = {"a": chance.randint(50, 99)} | {name: chance.randint(12, 49) for name in "bcd"}
        expression = expression.format(**values)
        answer = str(eval(expression))
        calculation = answer if number % 8 else f"<{expression}>{answer}\n{answer}"
        row = {"question": question.format(**values), "answer": answer, "calculation": calculation}
        file.write(json.dumps(row) + "\n")
