"""Pre-train the small CLIP model that ships, on captioned glyphs. See README.md beside this file.

python experiments/pretrain_glyph_clip/pretrain.py --steps 20000 --batch 1024 --out glyph_clip.safetensors
"""

import argparse
import json
import math
import time
import unicodedata
from pathlib import Path

import open_clip
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, log_softmax, normalize

from mergekit_lab.tasks.glyphs import CANVAS, FAMILIES, stack
from mergekit_lab.tasks.pretraining import list_pretraining_pairs

ASSETS = Path(__file__).resolve().parents[2] / "mergekit_lab" / "assets"
SIZE, START, END, CONTEXT = 32, 49406, 49407, 16
STYLES = ("regular", "bold", "italic", "bold italic")
OPENINGS = ("", "", "a", "the", "a picture of the", "an image of a", "a drawing of the", "a photo of the")
COMMON = ((0x0, 0x180), (0x370, 0x460), (0x2190, 0x2300))


class Glyphs:
    """All captioned glyphs on the device; batches take device operations alone, as CUDA graphs need."""

    def __init__(self, device: torch.device):
        pairs = list_pretraining_pairs()
        self.device = device
        self.bitmaps = stack(pairs).to(device)
        self.style = torch.tensor([STYLES.index(face.style) for face, _ in pairs], device=device)
        self.family = torch.tensor([FAMILIES.index(face.family) for face, _ in pairs], device=device)
        codes = sorted({code for _, code in pairs})
        index = {code: i for i, code in enumerate(codes)}
        self.character = torch.tensor([index[code] for _, code in pairs], device=device)
        common = [i for i, (_, code) in enumerate(pairs) if any(a <= code < b for a, b in COMMON)]
        self.common = torch.tensor(common, device=device)
        self.names = self._tokenize([unicodedata.name(chr(code)).lower() for code in codes])
        self.styles, self.families, self.openings = map(
            self._tokenize, (("", *STYLES), ("", *FAMILIES), OPENINGS)
        )
        self.luminance = torch.tensor([0.299, 0.587, 0.114], device=device)
        self.mean = torch.tensor(open_clip.OPENAI_DATASET_MEAN, device=device).reshape(3, 1, 1)
        self.std = torch.tensor(open_clip.OPENAI_DATASET_STD, device=device).reshape(3, 1, 1)

    def _tokenize(self, phrases) -> Tensor:
        encode = open_clip.tokenizer.SimpleTokenizer().encode
        rows = [encode(phrase)[: CONTEXT - 2] for phrase in phrases]
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)

    def make_batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Images float `[B, 3, SIZE, SIZE]`, tokens `[B, CONTEXT]`, and `[B, B]`: caption j fits image i."""
        device, half = self.device, size // 2
        rare = torch.randint(len(self.bitmaps), (size - half,), device=device)
        index = torch.cat([self.common[torch.randint(len(self.common), (half,), device=device)], rare])
        character, style, family = self.character[index], self.style[index], self.family[index]
        bare = torch.rand(size, device=device) < 0.25
        said_style = (style + 1) * (~bare & (torch.rand(size, device=device) < 0.6))
        said_family = (family + 1) * (~bare & (torch.rand(size, device=device) < 0.6))
        opening = torch.randint(len(OPENINGS), (size,), device=device) * ~bare
        pieces = [
            self.openings[opening],
            self.styles[said_style],
            self.families[said_family],
            self.names[character],
        ]
        fits = (
            (character[:, None] == character)
            & ((said_style == 0) | (said_style == style[:, None] + 1))
            & ((said_family == 0) | (said_family == family[:, None] + 1))
        )
        return self._distort(self.bitmaps[index].float() / 255), _join(torch.cat(pieces, 1)), fits

    def _distort(self, ink: Tensor) -> Tensor:
        count, device = len(ink), self.device

        def draw_uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.rand(shape or (count,), device=device) * (high - low) + low

        angle, slope = draw_uniform(-10, 10) * (math.pi / 180), draw_uniform(-0.1, 0.1)
        wide, tall = (SIZE / CANVAS) / draw_uniform(0.75, 1.15), draw_uniform(0.9, 1.1)
        shift = draw_uniform(-4 / CANVAS, 4 / CANVAS, 2, count)
        cos, sin = angle.cos(), angle.sin()
        rows = [wide * cos, wide * (cos * slope - sin) * tall, shift[0]]
        rows += [wide * sin, wide * (sin * slope + cos) * tall, shift[1]]
        grid = affine_grid(
            torch.stack(rows, 1).reshape(count, 2, 3), [count, 1, SIZE, SIZE], align_corners=False
        )
        ink = grid_sample(ink.unsqueeze(1), grid, align_corners=False)
        soft = avg_pool2d(ink, 3, 1, 1)
        ink = ink + draw_uniform(0, 0.6)[:, None, None, None] * (soft - ink)
        # Of four random color pairs the one of the strongest contrast in luminance.
        colors = torch.rand(count, 4, 2, 3, device=device)
        light = (colors * self.luminance).sum(-1)
        best = (light[..., 0] - light[..., 1]).abs().argmax(1)
        pair = colors[torch.arange(count, device=device), best][..., None, None]
        images = pair[:, 1] + ink * (pair[:, 0] - pair[:, 1])
        images = images + draw_uniform(0, 0.1)[:, None, None, None] * torch.randn_like(images)
        return (images.clamp(0, 1) - self.mean) / self.std


def _join(tokens: Tensor) -> Tensor:
    """Close the gaps (zeros), cut to the context and set start and end: `[B, L]` to `[B, CONTEXT]`."""
    used = tokens != 0
    positions = used.cumsum(1) * used
    room = torch.zeros(len(tokens), tokens.shape[1] + 2, dtype=tokens.dtype, device=tokens.device)
    room = room.scatter(1, positions, tokens)[:, :CONTEXT]
    stop = (used.sum(1, keepdim=True) + 1).clamp(max=CONTEXT - 1)
    room[:, 0] = START
    room = room.scatter(1, stop, END)
    return room * (torch.arange(CONTEXT, device=tokens.device) <= stop)


def compute_loss(model, glyphs: Glyphs, size: int, half_precision: bool) -> Tensor:
    """Contrastive loss; another caption that also fits the image is left out of its negatives."""
    images, tokens, fits = glyphs.make_batch(size)
    with torch.autocast(glyphs.device.type, torch.bfloat16, enabled=half_precision, cache_enabled=False):
        seen, read = model.encode_image(images), model.encode_text(tokens)
    logits = model.logit_scale.exp() * normalize(seen.float(), dim=-1) @ normalize(read.float(), dim=-1).T
    own = torch.eye(size, dtype=torch.bool, device=glyphs.device)
    logits = logits.masked_fill(fits & ~own, -1e4)
    return -(log_softmax(logits, 1).diagonal().mean() + log_softmax(logits, 0).diagonal().mean()) / 2


def train(options: argparse.Namespace) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    on_card = device.type == "cuda"
    open_clip.add_model_config(ASSETS / "glyph_clip.json")
    model = open_clip.create_model("glyph_clip").to(device).train()
    glyphs = Glyphs(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    rate = torch.tensor(options.lr, device=device)
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), capturable=on_card)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = compute_loss(model, glyphs, options.batch, on_card)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))
        return loss.detach()

    run, start = step, time.perf_counter()
    for i in range(options.steps):
        warm, rest = options.warmup, max(1, options.steps - options.warmup)
        share = (i + 1) / warm if i < warm else 0.5 * (1 + math.cos(math.pi * (i - warm) / rest))
        rate.fill_(options.lr * share)
        if on_card and i == 5 and not options.eager:
            run = _capture(step)
        loss = run()
        if i + 1 in options.keep:
            save(model, options.keep_in / f"step_{i + 1}.safetensors")
        if i % options.log == 0 or i == options.steps - 1:
            print(f"step {i} loss {loss.item():.4f} {time.perf_counter() - start:.0f} s", flush=True)
    facts = {
        "glyphs": len(glyphs.bitmaps),
        "characters": len(glyphs.names),
        "loss": round(loss.item(), 4),
        "seconds": round(time.perf_counter() - start, 1),
        "card": torch.cuda.get_device_name() if on_card else "none, CPU",
        "torch": torch.__version__,
        "arguments": {k: v for k, v in vars(options).items() if k not in ("out", "facts", "keep", "keep_in")},
    }
    return model, facts


def save(model: torch.nn.Module, path: Path) -> None:
    """The whole model in half precision, as it ships; `base=PATH` makes it a run's backbone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().cpu().contiguous() for name, tensor in model.state_dict().items()}, path)


def _capture(step):
    """The whole step as one CUDA graph: its hundreds of small kernels cost more to launch than to run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", type=int, nargs="+", default=[], help="steps after which the model is kept")
    parser.add_argument(
        "--keep-in", type=Path, default=Path("bases"), help="folder of these: step_N.safetensors"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--out", type=Path, default=ASSETS / "glyph_clip.safetensors")
    parser.add_argument("--facts", type=Path, default=Path(__file__).with_name("pretraining.json"))
    options = parser.parse_args()
    model, facts = train(options)
    save(model, options.out)
    options.facts.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
