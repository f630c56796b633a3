"""Runs OpenHands' default agent on the task given on standard input, in the sandbox's current directory.

``launchers/agents.sh openhands`` copies this file into the toolbox, next to OpenHands' SDK and its Python interpreter.
The model is read from ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``. The exit code is 1 if the
conversation ended in an error.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    from openhands.sdk import LLM, Conversation
    from openhands.tools.preset.default import get_default_agent
    from pydantic import SecretStr

    llm = LLM(
        model=f"openai/{os.environ['OPENAI_MODEL']}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
        usage_id="agent",
        timeout=int(os.environ.get("MEGAFLOW_CALL_S", "3600")),
        num_retries=1,  # the gateway retries
        temperature=None,  # use the policy's sampling; training uses only such calls
        top_p=None,
    )
    conversation = Conversation(agent=get_default_agent(llm=llm, cli_mode=True), workspace=os.getcwd())
    conversation.send_message(sys.stdin.read())
    conversation.run()
    status = str(conversation.state.execution_status.value)
    print(f"conversation: {status}")
    return status == "error"


if __name__ == "__main__":
    code = int(main())
    sys.stdout.flush()
    os._exit(code)  # do not wait for the terminal's threads
