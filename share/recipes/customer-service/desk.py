"""Requests of customers as tasks, and the agent: a clerk with tools who talks to a simulated customer.

The customer is the role ``customer`` of the team. ``score`` carries out the clerk's calls again in a fresh database and
compares the result with the one that the request should lead to.
"""

import json

import shop

from megaflow_hpc.agents import ask
from megaflow_hpc.types import AgentResult

DONE = "DONE"
CUSTOMER = """\
You write to the clerk of a shop, as its customer. {brief}
Write one short message at a time, as a customer would. Say who you are, with your postcode, in the first message. Tell
nothing that you do not know. When the clerk says that your request is done, or refuses it, answer only {done}.
The clerk is there now. Write your first message."""


class Request:
    """A request of a customer."""

    image = "none"

    @classmethod
    def instances(cls):
        return {name: {"name": name} for name in shop.requests()}

    def __init__(self, name):
        self.request = shop.requests()[name]
        self.instruction = shop.RULES
        self.solved = False

    async def solve(self, sandbox):  # what the agent `oracle` does
        self.solved = True

    def score(self, sandbox, messages):
        right = shop.Shop(shop.database())
        for name, arguments in self.request["calls"]:
            right.call(name, arguments)
        after = shop.Shop(shop.database())
        for name, arguments in self.request["calls"] if self.solved else calls(messages):
            after.call(name, arguments)
        return float(after.data == right.data)


def calls(messages):
    """Yields the clerk's calls of tools in a conversation."""
    for message in messages:
        for call in (message.get("tool_calls") or ()) if message["role"] == "assistant" else ():
            yield call["function"]["name"], arguments_of(call)


def arguments_of(call):
    """Returns the arguments of a call; ``None`` if they are not JSON."""
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, TypeError):
        return None


class Desk:
    """The clerk, who calls tools and answers the customer until the customer is done.

    Args:
        max_turns: maximum number of answers by the clerk.
        max_tokens: maximum length of an answer by either side.
    """

    def __init__(self, max_turns=None, max_tokens=512):
        self.turns, self.options = max_turns or 30, {"max_tokens": max_tokens}

    async def run(self, task, sandbox, model):
        brief = shop.requests()[task.metadata["python"]["arguments"]["name"]]["brief"]
        customer = [{"role": "user", "content": CUSTOMER.format(brief=brief, done=DONE)}]
        clerk = [{"role": "system", "content": task.instruction}]
        database, heard = shop.Shop(shop.database()), True
        for _ in range(self.turns):
            if heard:  # the clerk's last message was for the customer
                said = await ask(model, customer, "customer", **self.options)
                if DONE in said.text:
                    return AgentResult(messages=clerk)
                customer.append(said.message)
                clerk.append({"role": "user", "content": said.text})
            answer = await ask(model, clerk, "clerk", tools=list(shop.TOOLS.values()), **self.options)
            clerk.append(answer.message)
            called = answer.message.get("tool_calls") or ()
            for call in called:
                result = database.call(call["function"]["name"], arguments_of(call))
                clerk.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
            heard = not called
            if heard:
                customer.append({"role": "user", "content": answer.text or "(The clerk says nothing.)"})
        return AgentResult(status="truncated", error=f"not done after {self.turns} answers", messages=clerk)
