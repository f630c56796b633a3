"""Writes a corpus about an invented country, and questions that only a search answers.

usage: python make.py [--towns N] [--seed S]

Writes index/corpus.jsonl, questions.jsonl and the scripted answers of the rehearsal. No model can know the answers: all
names are made up. A question needs two or three searches. The same seed makes the same files.
"""

import argparse
import json
import random
from pathlib import Path

HERE = Path(__file__).parent
STARTS = (
    "Bra",
    "Cel",
    "Dor",
    "Fen",
    "Gal",
    "Hol",
    "Ker",
    "Lum",
    "Mor",
    "Nar",
    "Pel",
    "Ros",
    "Sel",
    "Tam",
    "Vol",
    "Wes",
)
MIDDLES = ("an", "el", "ib", "or", "und", "ast", "im", "oth")
ENDS = ("burg", "mere", "wick", "ford", "stad", "holm", "dale", "port")
FIRST = ("Anra", "Belto", "Cira", "Dunel", "Esmo", "Farin", "Gelia", "Horst", "Ilka", "Jorun", "Kesta", "Lodo")
PRODUCTS = (
    "violins",
    "sail cloth",
    "clocks",
    "paper",
    "tiles",
    "bells",
    "lenses",
    "ropes",
    "candles",
    "skis",
    "tea",
    "ink",
)


def distinct(chance, make, number):
    """Returns ``number`` different names."""
    found = {}
    while len(found) < number:
        found[make(chance)] = None
    return list(found)


def world(towns, seed):
    """Returns passages, and questions with the titles of the passages that answer them."""
    chance = random.Random(seed)
    pick = chance.choice
    places = distinct(chance, lambda c: c.choice(STARTS) + c.choice(MIDDLES) + c.choice(ENDS), towns)
    rivers = distinct(chance, lambda c: c.choice(STARTS) + c.choice(MIDDLES) + "a", towns // 3)
    people = distinct(chance, lambda c: f"{c.choice(FIRST)} {c.choice(STARTS)}{c.choice(MIDDLES)}sen", 2 * towns)
    firms = distinct(chance, lambda c: f"{c.choice(STARTS)}{c.choice(MIDDLES)} & Daughters", towns // 2)
    passages, questions = [], []
    river_of = {place: pick(rivers) for place in places}
    mayor_of = dict(zip(places, people[:towns], strict=True))
    made_by = {firm: (pick(PRODUCTS), pick(places), chance.randrange(1700, 1990)) for firm in firms}
    lives = {person: (pick(places), pick(firms), chance.randrange(1930, 2000)) for person in people}
    for place in places:
        text = f"{place} is a town on the river {river_of[place]}. Its mayor is {mayor_of[place]}."
        passages.append({"title": place, "text": f"{text} It has {chance.randrange(2, 90)},000 inhabitants."})
    for firm, (product, place, year) in made_by.items():
        text = f"The company {firm} makes {product}. It was founded in {year} and has its seat in {place}."
        passages.append({"title": firm, "text": text})
    for person, (place, firm, year) in lives.items():
        text = f"{person} was born in {place} in {year}, and works for {firm}."
        passages.append({"title": person, "text": text})
    for person, (place, firm, _) in lives.items():
        product, _, year = made_by[firm]
        questions += [
            (f"On which river is the town in which {person} was born?", river_of[place], (person, place)),
            (f"In which year was the company founded for which {person} works?", str(year), (person, firm)),
        ]
    for place, mayor in mayor_of.items():
        firm = lives[mayor][1]
        text = f"What does the company make for which the mayor of {place} works?"
        questions.append((text, made_by[firm][0], (place, mayor, firm)))
    chance.shuffle(passages)
    chance.shuffle(questions)
    return passages, [{"question": q, "answer": answer, "titles": titles} for q, answer, titles in questions]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path.relative_to(HERE)}: {len(rows)} lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towns", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    passages, questions = world(asked.towns, asked.seed)
    write_lines(HERE / "index" / "corpus.jsonl", passages)
    write_lines(HERE / "questions.jsonl", questions)
    answers = [
        {
            "when": one["question"],
            "answers": [*(f"<search>{t}</search>" for t in one["titles"]), f"<answer>{one['answer']}</answer>"],
        }
        for one in questions
    ]
    (HERE / "answers.yaml").write_text(json.dumps({"tasks": answers[:20]}, indent=1))  # JSON is YAML


if __name__ == "__main__":
    main()
