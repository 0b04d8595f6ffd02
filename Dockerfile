# A server for CPUs with OpenAI's endpoints:
#   python -m build && docker build -t eaglegbv . && docker run --rm -p 8000:8000 -v eaglegbv:/cache eaglegbv tiny
FROM python:3.12-slim-bookworm

# The native library of CPUs is built for the processor that runs it, at the first start.
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*

COPY dist/*.whl /tmp/
# The wheel itself says its version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && wheel="$(ls /tmp/*.whl)" \
    && pip install --no-cache-dir "${wheel}[gguf,grammar,serve]"

RUN useradd --create-home --uid 1000 server && mkdir /cache && chown 1000 /cache
USER 1000
ENV EAGLEGBV_CACHE=/cache HF_HOME=/cache/huggingface
EXPOSE 8000
ENTRYPOINT ["eaglegbv", "serve", "--backend", "local", "--host", "0.0.0.0"]
CMD ["tiny"]
