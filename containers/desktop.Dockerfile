# The image of desktops; desktop.def is its twin. In this directory:
#   docker build -f desktop.Dockerfile -t desktop .
FROM debian:bookworm-slim
ENV LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
RUN echo 'APT::Sandbox::User "root";' >/etc/apt/apt.conf.d/01one-user \
 && apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
      python3 python3-pip python3-venv python-is-python3 git patch ca-certificates procps \
      xvfb xdotool openbox chromium python3-pil l3afpad pcmanfm xterm dbus-x11 fonts-dejavu-core fonts-liberation2 \
 && rm -rf /var/lib/apt/lists/* /usr/lib/python3*/EXTERNALLY-MANAGED
RUN pip download -q --no-deps --dest /tmp/pages miniwob==1.1.0 \
 && python3 -m zipfile -e /tmp/pages/miniwob-1.1.0-*.whl /tmp/pages \
 && mv /tmp/pages/miniwob/html /opt/miniwob \
 && echo 1.1.0 >/opt/miniwob/VERSION \
 && rm -rf /tmp/pages
COPY chromium-policy.json /etc/chromium/policies/managed/screen.json
COPY screen.py /usr/local/bin/screen
COPY screen_server.py /usr/local/lib/screen_server.py
RUN chmod 755 /usr/local/bin/screen /usr/local/lib/screen_server.py
