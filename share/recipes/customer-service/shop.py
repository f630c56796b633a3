"""A small shop: its database, the tools of its clerk, the clerk's rules, and the requests of its customers."""

import copy
import inspect
import random

RULES = """\
You are the clerk of a shop for garden tools. A customer writes to you. Today is day 100.
- First find the customer by name and postcode. Help with that customer's own orders only.
- An order can be cancelled, and its address changed, only before it is shipped (status: paid).
- A delivered item can be returned only within 30 days after the day of delivery.
- A delivered item can be exchanged within the same 30 days, for the same product in another size that is in stock.
- If a rule forbids a request, record the refusal, tell the customer why, and change nothing.
- Do what the customer asks and no more. Do not invent anything. Say when everything is done.
"""
NAMES = ("Ada Brook", "Ben Carter", "Cleo Dunn", "Dev Evans", "Elif Frost", "Finn Grant", "Gus Hale", "Hana Iyer")
PRODUCTS = ("gloves", "rake", "boots", "shears", "hose", "spade")
SIZES = ("small", "medium", "large")
TODAY = 100


class ToolError(Exception):
    """A refusal that the clerk reads."""


class Shop:
    """The database, with a method for each tool. Tools check if a call is possible, not if the rules allow it."""

    def __init__(self, data):
        self.data = copy.deepcopy(data)
        self._customer = None

    def find_customer(self, name: str, postcode: str) -> dict:
        """Find a customer, and list the numbers of the customer's orders. The other tools need it first."""
        for number, customer in self.data["customers"].items():
            if (customer["name"].lower(), customer["postcode"]) == (name.strip().lower(), postcode.strip()):
                self._customer = number
                orders = [order for order, row in self.data["orders"].items() if row["customer"] == number]
                return {"customer": number, **customer, "orders": orders}
        raise ToolError("no customer has this name and postcode")

    def get_order(self, order: str) -> dict:
        """Read an order: status, address, day of delivery, items."""
        return self._order(order)

    def check_stock(self, product: str, size: str) -> dict:
        """Read how many pieces of a product in a size are in stock."""
        return {"in_stock": self.data["stock"].get(f"{product} {size}", 0)}

    def cancel_order(self, order: str) -> dict:
        """Cancel an order."""
        self._order(order)["status"] = "cancelled"
        return self._order(order)

    def change_address(self, order: str, address: str) -> dict:
        """Change the address of an order."""
        self._order(order)["address"] = address.strip()
        return self._order(order)

    def return_item(self, order: str, item: str) -> dict:
        """Take an item of an order back. An item is a product and a size: rake small."""
        self._take(order, item)
        self._order(order)["returned"].append(item)
        return self._order(order)

    def exchange_item(self, order: str, item: str, new_item: str) -> dict:
        """Exchange an item of an order for another one. An item is a product and a size: rake small."""
        if not self.data["stock"].get(new_item):
            raise ToolError(f"{new_item} is not in stock")
        self._take(order, item)
        self.data["stock"][new_item] -= 1
        self._order(order)["items"].append(new_item)
        return self._order(order)

    def record_refusal(self, order: str) -> dict:
        """Record that a request about an order was refused because of a rule."""
        self._order(order)["refused"] = True
        return self._order(order)

    def _order(self, order):
        row = self.data["orders"].get(str(order).strip().lstrip("#"))
        if self._customer is None:
            raise ToolError("find the customer first")
        if row is None or row["customer"] != self._customer:
            raise ToolError(f"this customer has no order {order}")
        return row

    def _take(self, order, item):
        if item not in self._order(order)["items"]:
            raise ToolError(f"order {order} has no item {item}")
        self._order(order)["items"].remove(item)

    def call(self, name, arguments):
        """Calls a tool as a model does. Returns its result, or an error that the clerk reads."""
        if name not in TOOLS:
            return {"error": f"there is no tool {str(name)[:60]}"}
        if not isinstance(arguments, dict) or not all(isinstance(value, str) for value in arguments.values()):
            return {"error": "expected an object of texts"}
        try:
            return copy.deepcopy(getattr(self, name)(**arguments))
        except (ToolError, TypeError) as error:
            return {"error": str(error)}


def _schema(name):
    method = getattr(Shop, name)
    fields = [field for field in inspect.signature(method).parameters if field != "self"]
    parameters = {"type": "object", "properties": {field: {"type": "string"} for field in fields}, "required": fields}
    return {"type": "function", "function": {"name": name, "description": method.__doc__, "parameters": parameters}}


TOOLS = {
    name: _schema(name)
    for name in (
        *("find_customer", "get_order", "check_stock", "cancel_order", "change_address"),
        *("return_item", "exchange_item", "record_refusal"),
    )
}
"""Name of each tool → its description in OpenAI format."""


def database():
    """Returns the shop before anybody has called."""
    chance = random.Random(7)
    customers, orders = {}, {}
    stock = {f"{product} {size}": chance.choice((0, 2, 5)) for product in PRODUCTS for size in SIZES}
    for number, name in enumerate(NAMES, 1):
        customers[str(number)] = {"name": name, "postcode": f"{chance.randrange(10000, 99999)}"}
        for status, delivered in (("paid", None), ("shipped", None), ("delivered", 90), ("delivered", 40)):
            items = [f"{product} {chance.choice(SIZES)}" for product in chance.sample(PRODUCTS, 2)]
            orders[f"{1000 + len(orders) * 7}"] = {
                "customer": str(number),
                "status": status,
                "delivered_on_day": delivered,
                "address": f"{chance.randrange(1, 90)} {chance.choice(('Elm', 'Oak', 'Ash'))} Road",
                "items": items,
                "returned": [],
                "refused": False,
            }
    return {"customers": customers, "orders": orders, "stock": stock}


def requests():
    """Returns all requests: name → what the customer knows and wants, and the calls that fulfil it."""
    data, found = database(), {}
    for number, customer in data["customers"].items():
        who = f"You are {customer['name']}, postcode {customer['postcode']}."
        first = ("find_customer", {"name": customer["name"], "postcode": customer["postcode"]})
        own = [order for order, row in data["orders"].items() if row["customer"] == number]
        paid, shipped, recent, old = own
        item, other = (data["orders"][order]["items"][0] for order in (recent, old))
        wants = {
            "cancel": (f"You want to cancel order {paid}.", [("cancel_order", {"order": paid})]),
            "cancel-late": (f"You want to cancel order {shipped}.", [("record_refusal", {"order": shipped})]),
            "move": (
                f"You moved, and order {paid} should go to 5 Mill Lane. You give the new address only when asked.",
                [("change_address", {"order": paid, "address": "5 Mill Lane"})],
            ),
            "return": (
                f"You want to return the {item.split()[0]} of a recent delivery. You forgot the number of the order.",
                [("return_item", {"order": recent, "item": item})],
            ),
            "return-late": (
                f"You want to return the {other.split()[0]} of order {old}.",
                [("record_refusal", {"order": old})],
            ),
        }
        product, size = item.split()
        in_stock = [s for s in SIZES if s != size and data["stock"][f"{product} {s}"]]
        if in_stock:
            new = f"{product} {in_stock[0]}"
            wants["exchange"] = (
                f"The {product} of order {recent} does not fit. You want it in size {in_stock[0]}.",
                [("exchange_item", {"order": recent, "item": item, "new_item": new})],
            )
        for kind, (want, calls) in wants.items():
            found[f"{kind}-{number}"] = {"brief": f"{who} {want}", "calls": [first, *calls]}
    return found
