"""OpenHands' default agent on the task of standard input, in the current directory; runs inside the sandbox.

``launchers/agents.sh openhands`` copies this file into the tool box, beside OpenHands' SDK and a Python for it. The
model is what ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL`` say. The exit code is 1 where the
conversation ended in an error.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path


def main() -> int:
    """Runs the agent to its end and returns the exit status."""
    site.addsitedir(str(Path(__file__).parent / "site"))  # not PYTHONPATH: the task's own programs would see it
    from openhands.sdk import LLM, Conversation
    from openhands.tools.preset.default import get_default_agent
    from pydantic import SecretStr

    llm = LLM(
        model=f"openai/{os.environ['OPENAI_MODEL']}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
        usage_id="agent",
        timeout=int(os.environ.get("MEGAFLOW_CALL_S", "3600")),
        num_retries=1,  # the gateway tries again by itself
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
    os._exit(code)  # its terminal's threads would be waited for
