# A CPU image: docker build --tag onefile-rl . && docker run --rm --shm-size 2g onefile-rl bash scripts/quickstart.sh
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git libnuma1 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.9
RUN useradd --create-home user && install --directory --owner user /onefile-rl
USER user
WORKDIR /onefile-rl
# The packages for this kind of machine, also if a container sees another one.
ENV MACHINE=cpu UV_NO_CACHE=1
# What the packages depend on comes first, so that a change of the code keeps this layer.
COPY --chown=user scripts/install.sh scripts/
COPY --chown=user requirements-cpu.txt pyproject.toml README.md ./
COPY --chown=user algos/__init__.py algos/
COPY --chown=user common/__init__.py common/
RUN bash scripts/install.sh
COPY --chown=user . .
ENV PATH=/onefile-rl/.venv/bin:$PATH
CMD ["bash", "scripts/quickstart.sh"]
