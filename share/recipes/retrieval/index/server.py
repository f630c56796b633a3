"""A search engine (BM25) over corpus.jsonl, in the standard library: GET /search?q=WORDS&k=3 returns passages as JSON.

usage: server.py [PORT]
"""

import http.server
import json
import math
import re
import sys
import urllib.parse
from collections import Counter, defaultdict
from pathlib import Path

K1, B = 0.9, 0.4


class Index:
    """An inverted index of passages {title, text}."""

    def __init__(self, passages):
        self.passages = passages
        self.lengths = []
        self.postings = defaultdict(list)
        for number, passage in enumerate(passages):
            counts = Counter(words(f"{passage['title']} {passage['text']}"))
            self.lengths.append(sum(counts.values()))
            for word, count in counts.items():
                self.postings[word].append((number, count))
        self.mean_length = sum(self.lengths) / len(self.lengths)

    def search(self, query, k):
        """Returns the best k passages."""
        scores = Counter()
        for word in set(words(query)):
            found = self.postings.get(word, ())
            weight = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for number, count in found:
                length = 1 - B + B * self.lengths[number] / self.mean_length
                scores[number] += weight * count * (K1 + 1) / (count + K1 * length)
        return [self.passages[number] for number, _ in scores.most_common(k)]


def words(text):
    return re.findall(r"\w+", text.lower())


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        try:
            k = max(1, min(10, int(asked.get("k", ["3"])[0])))
        except ValueError:
            k = 3
        body = json.dumps(self.server.index.search(asked.get("q", [""])[0][:1000], k)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def main():
    lines = (Path(__file__).parent / "corpus.jsonl").read_text().splitlines()
    server = http.server.ThreadingHTTPServer(("", int(sys.argv[1]) if len(sys.argv) > 1 else 8000), Handler)
    server.index = Index([json.loads(line) for line in lines])
    server.serve_forever()


if __name__ == "__main__":
    main()
