"""Shapes of training loops: where zero_grad, backward and step stand, how often, for how many models."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.harness import PLACEMENTS, STEPS, Run, idiom
from tests.oracle.models import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    TinyLm,
    held_lm,
    token_batches,
    token_loss,
    vector_batches,
)

FIXED = "parameters cannot be added: the memory and the disk of the optimizer are reserved once"


class Net(nn.Module):
    """Vectors to vectors: a scale and two layers of the root, blocks between them. Args: p: of dropout."""

    def __init__(self, inputs: int, outputs: int, blocks: int = 2, *, p: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(inputs))
        self.inner = nn.Linear(inputs, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.drop = nn.Dropout(p)
        self.outer = nn.Linear(WIDTH, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.drop(self.blocks(torch.tanh(self.inner(x * self.scale)))))
        return out


def held_net(run: Run, inputs: int = 5, outputs: int = 3, **options: Any) -> tuple[Net, Any]:
    model = Net(inputs, outputs)
    return model, run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def vector_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(inputs).float(), targets)


# Closures, and places for zero_grad.


@idiom(
    "gives step() a closure of forward, zero_grad and backward, clips at its end",
    source="Lightning-AI/pytorch-lightning src/lightning/pytorch/loops/optimization/automatic.py:137",
)
def closure_clears_between_forward_and_backward(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():

        def closure(tokens: Tensor = tokens, targets: Tensor = targets) -> Tensor:
            loss = token_loss(model, tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            run.log(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            return loss

        run.log(optimizer.step(closure))
    run.log(model)


@idiom(
    "gives step() a closure that clears the gradients first",
    source="pytorch/examples time_sequence_prediction/train.py:61",
)
def closure_clears_first(run: Run) -> None:
    model, optimizer = held_net(run)
    for inputs, targets in vector_batches(5, 3):

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = vector_loss(model, inputs, targets)
            run.log(loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        run.log(model(torch.ones(2, 5)))
    run.log(model)


@idiom(
    "clears gradients to zeros, and not to None",
    source="pytorch/examples distributed/rpc/batch/parameter_server.py:62",
)
def clears_to_zeros(run: Run) -> None:
    model, optimizer = held_lm(run)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.log(loss)
    run.log(model)


@idiom(
    "clears gradients by setting each to None, and then the optimizer's",
    source="facebookresearch/fairseq fairseq/optim/fairseq_optimizer.py:140",
)
def clears_one_by_one(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        for p in model.parameters():
            p.grad = None
        if number % 2:
            optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss, sum(p.grad is None for p in model.parameters()))
    run.log(model)


@idiom(
    "clears through the module, and looks at a batch whose gradients it throws away",
    source="pytorch/examples word_language_model/main.py:178",
)
def clears_through_the_module(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        if number % 2:
            token_loss(model, tokens, targets.flip(0)).backward()
        model.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss)
    run.log(model)


# Layers without a gradient.


class DroppedBlocks(nn.ModuleList):
    """Half of its blocks, other ones each time, while it trains."""

    def __iter__(self) -> Iterator[nn.Module]:
        draws = torch.empty(len(self)).uniform_()
        for number, block in enumerate(super().__iter__()):
            if not self.training or draws[number] > 0.5:
                yield block


def dropped_lm() -> TinyLm:
    model = TinyLm(4)
    model.blocks = DroppedBlocks(model.blocks)
    return model


@idiom(
    "leaves out layers at random: they have no gradient in that step",
    source="facebookresearch/fairseq fairseq/modules/layer_drop.py:40",
)
def leaves_out_layers(run: Run) -> None:
    model = dropped_lm()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(loss, norm, sum(p.grad is None for p in model.parameters()))
    run.log(token_loss(model.eval(), tokens, targets), model)


@idiom(
    "leaves out layers at random, and clears gradients to zeros: those layers go on by decay and momentum",
    source="huggingface/accelerate examples/torch_native_parallelism/nd_parallel.py:77",
)
def leaves_out_layers_with_zeros(run: Run) -> None:
    model = dropped_lm()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.log(loss)
    run.log(token_loss(model.eval(), tokens, targets), model)


# Accumulation.


@idiom("divides the loss, and steps after four micro-batches", source="karpathy/nanoGPT train.py:301")
def accumulates(run: Run) -> None:
    micro = 4
    model, optimizer = held_lm(run, accumulation=micro)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        for tokens, targets in token_batches(micro, seed=step):
            loss = token_loss(model, tokens, targets) / micro
            scaler.scale(loss).backward()
            run.log(loss.item() * micro)
        scaler.unscale_(optimizer)
        run.log(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    run.log(model)


@idiom(
    "steps at the end of an epoch, too, where the last group of micro-batches is shorter",
    source="huggingface/pytorch-image-models train.py:1278",
)
def accumulates_with_short_last_group(run: Run) -> None:
    model, optimizer = held_net(run, accumulation=3)
    for epoch in range(3):
        batches = list(vector_batches(5, 3, 5, seed=epoch))
        group = 3
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(batches):
            is_last = number == len(batches) - 1
            if number >= len(batches) - len(batches) % 3:
                group = len(batches) % 3
            loss = vector_loss(model, inputs, targets) / group
            loss.backward()
            run.log(loss)
            if is_last or (number + 1) % 3 == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
                optimizer.step()
                optimizer.zero_grad()
    run.log(model)


@idiom(
    "accumulates sums of token losses over the number of tokens of the whole group",
    source="huggingface/accelerate examples/by_feature/gradient_accumulation_for_autoregressive_models.py:244",
)
def accumulates_by_tokens(run: Run) -> None:
    model, optimizer = held_lm(run, accumulation=3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for step in range(STEPS):
        group = [(t, y.masked_fill(y < 3 * n, -100)) for n, (t, y) in enumerate(token_batches(3, seed=step))]
        count = sum((y != -100).sum() for _, y in group)
        losses = []
        for tokens, targets in group:
            logits = model(tokens).float().flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100) / count
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.log(sum(losses), norm)
    run.log(model)


@idiom(
    "runs all micro-batches forwards first, and then backwards with the gradients of their outputs",
    source="pytorch/pytorch torch/distributed/pipelining/_backward.py:434",
)
def forwards_first_then_backwards(run: Run) -> None:
    model, optimizer = held_net(run, accumulation=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        held = []
        for inputs, targets in vector_batches(5, 3, 2, seed=step):
            outputs = model(inputs)
            ahead = outputs.detach().float().requires_grad_()
            loss = F.mse_loss(ahead, targets)
            loss.backward()
            held.append((outputs, ahead.grad))
            run.log(loss)
        for outputs, gradient in held:
            torch.autograd.backward([outputs], grad_tensors=[gradient.to(outputs.dtype)])
        optimizer.step()
    run.log(model)


@idiom(
    "embeds a large batch without a graph, takes the gradients of the embeddings, and embeds again piece by piece",
    source="luyug/GradCache src/grad_cache/grad_cache.py:242",
)
def caches_gradients_of_embeddings(run: Run) -> None:
    pieces = 3
    model, optimizer = held_net(run, accumulation=pieces)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [inputs for inputs, _ in vector_batches(5, 3, pieces, seed=step)]
        with torch.no_grad():
            found = torch.cat([model(inputs) for inputs in batches]).float()
        found.requires_grad_()
        similar = F.normalize(found) @ F.normalize(found.roll(1, 0)).T
        loss = F.cross_entropy(4 * similar, torch.arange(len(found)))
        loss.backward()
        for inputs, gradient in zip(batches, found.grad.split(5), strict=True):
            torch.dot(model(inputs).float().flatten(), gradient.flatten()).backward()
        optimizer.step()
        run.log(loss)
    run.log(model)


# Several losses, several passes.


@idiom(
    "keeps the graph of one forward for a second backward",
    source="eriklindernoren/PyTorch-GAN implementations/bicyclegan/bicyclegan.py:187",
)
def keeps_the_graph(run: Run) -> None:
    model, optimizer = held_net(run, accumulation=2)
    for inputs, targets in vector_batches(5, 3):
        optimizer.zero_grad()
        outputs = model(inputs).float()
        loss, penalty = F.mse_loss(outputs, targets), 0.1 * outputs.abs().mean()
        loss.backward(retain_graph=True)
        penalty.backward()
        optimizer.step()
        run.log(loss, penalty)
    run.log(model)


@idiom(
    "runs the same model on two inputs, and goes back once",
    source="pytorch/examples siamese_network/main.py:66",
)
def two_forwards_one_backward(run: Run) -> None:
    model, optimizer = held_net(run)
    for inputs, targets in vector_batches(5, 5):
        optimizer.zero_grad()
        first, second = model(inputs), model(targets)
        loss = F.cosine_embedding_loss(first.float(), second.float(), torch.tensor([1, -1, 1, -1, 1]))
        loss.backward()
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "carries a hidden state from batch to batch, and cuts it off the graph",
    source="pytorch/examples word_language_model/main.py:183",
)
def truncated_backpropagation(run: Run) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))
            self.start = nn.Parameter(torch.zeros(2, WIDTH))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: Tensor, hidden: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
            hidden = [h.expand(len(tokens), -1) for h in self.start] if hidden is None else hidden
            outputs = []
            for x in self.embedding(tokens).unbind(1):
                for number, cell in enumerate(self.cells):
                    hidden[number] = x = cell(x, hidden[number])
                outputs.append(self.head(x))
            return torch.stack(outputs, dim=1), hidden

    model = Recurrent()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    hidden = None
    for tokens, targets in token_batches():
        hidden = None if hidden is None else [h.detach() for h in hidden]
        optimizer.zero_grad()
        logits, hidden = model(tokens, hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        run.log(loss, norm)
    run.log(model)


@idiom(
    "scales the gradient of a hidden state in a hook while it unrolls, and weighs the loss in another",
    source="werner-duvaud/muzero-general trainer.py:178",
)
def hooks_on_hidden_states(run: Run) -> None:
    model, optimizer = held_net(run, 5, 5)
    for inputs, targets in vector_batches(5, 5):
        hidden, losses = model(inputs), []
        for _ in range(2):
            hidden.register_hook(lambda grad: grad * 0.5)
            hidden = model(hidden)
            loss = F.mse_loss(hidden.float(), targets)
            loss.register_hook(lambda grad: grad / 2)
            losses.append(loss)
        total = torch.stack(losses).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        run.log(*losses)
    run.log(model)


@idiom(
    "logs the gradients of the inputs of linear layers, with full backward hooks",
    source="NVIDIA/Megatron-LM megatron/training/dgrad_logging.py:91",
)
def full_backward_hooks(run: Run) -> None:
    model = Net(5, 3)
    seen: dict[str, Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Block):

            def note(module: nn.Module, inputs: Any, outputs: Any, name: str = name) -> None:
                for number, grad in enumerate(chain(inputs, outputs)):
                    if grad is not None:
                        seen[f"{name}/{number}"] = grad.detach().cpu()

            hooks.append(module.register_full_backward_hook(note))
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for inputs, targets in vector_batches(5, 3):
        loss = vector_loss(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss, dict(sorted(seen.items())))
    for hook in hooks:
        hook.remove()
    run.log(model)


@idiom(
    "trains with anomaly detection",
    source="Lightning-AI/pytorch-lightning src/lightning/pytorch/trainer/trainer.py:1128",
)
def detects_anomalies(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        with torch.autograd.set_detect_anomaly(True, check_nan=number % 2 == 0):
            loss = token_loss(model, tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        run.log(loss)
    run.log(model)


# Gradients of inputs, and of gradients.


@idiom(
    "makes adversarial inputs with a backward pass whose other gradients it throws away",
    source="locuslab/fast_adversarial MNIST/train_mnist.py:79",
)
def adversarial_training(run: Run) -> None:
    model, optimizer = held_net(run)
    for inputs, targets in vector_batches(5, 3):
        delta = torch.zeros_like(inputs).uniform_(-0.1, 0.1)
        delta.requires_grad = True
        vector_loss(model, inputs + delta, targets).backward()
        grad = delta.grad.detach()
        delta.data = torch.clamp(delta + 0.05 * torch.sign(grad), -0.1, 0.1)
        delta = delta.detach()
        loss = vector_loss(model, inputs + delta, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "asks for the gradient of the inputs alone, between training steps",
    source="huggingface/diffusers src/diffusers/experimental/rl/value_guided_sampling.py:101",
)
def gradients_of_inputs(run: Run) -> None:
    model, optimizer = held_net(run, 5, 1)
    for inputs, targets in vector_batches(5, 1):
        guided = inputs.clone()
        model.eval()
        for _ in range(2):
            with torch.enable_grad():
                guided.requires_grad_()
                gradient = torch.autograd.grad([model(guided).float().sum()], [guided])[0]
            guided = (guided + 0.1 * gradient).detach()
        model.train()
        optimizer.zero_grad()
        loss = vector_loss(model, guided, targets)
        loss.backward()
        optimizer.step()
        run.log(loss, guided)
    run.log(model)


@idiom(
    "climbs along the gradient, takes the gradient there, goes back and steps (SAM)",
    source="davda54/sam sam.py:25",
)
def sharpness_aware(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
            before = {p: p.data.clone() for p in model.parameters() if p.grad is not None}
            for p in before:
                p.add_(p.grad * (0.05 / (norm + 1e-12)).to(p))
        optimizer.zero_grad()
        there = token_loss(model, tokens, targets)
        there.backward()
        with torch.no_grad():
            for p, value in before.items():
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss, there, norm)
    run.log(model)


@idiom(
    "adds the norm of the parameters' own gradients to the loss, and follows the Hessian along a vector",
    source="amirgholami/PyHessian pyhessian/utils.py:82",
    bf16=False,
)
def penalises_gradients_of_parameters(run: Run) -> None:
    model, optimizer = held_net(run)
    params = list(model.parameters())
    for inputs, targets in vector_batches(5, 3):
        loss = vector_loss(model, inputs, targets)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        vector = [torch.ones_like(p) for p in params]
        curvature = torch.autograd.grad(grads, params, grad_outputs=vector, only_inputs=True, retain_graph=True)
        penalty = sum(g.pow(2).sum() for g in grads)
        optimizer.zero_grad()
        (loss + 0.1 * penalty).backward()
        optimizer.step()
        run.log(loss, penalty, *curvature)
    run.log(model)


# Several models, several optimizers.


def bce(logits: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), torch.full_like(logits, label).float())


@idiom(
    "trains a discriminator on real and made data with a backward pass each, and a generator through it",
    source="pytorch/examples dcgan/main.py:236",
)
def generative_adversarial(run: Run) -> None:
    maker, critic = Net(4, 5), Net(5, 1)
    maker_optimizer = run.hold(maker, torch.optim.AdamW(maker.parameters(), lr=1e-2, betas=(0.5, 0.999)))
    critic_optimizer = run.hold(
        critic, torch.optim.AdamW(critic.parameters(), lr=1e-2, betas=(0.5, 0.999)), accumulation=2
    )
    for noise, real in vector_batches(4, 5):
        critic.zero_grad()
        on_real = bce(critic(real), 1.0)
        on_real.backward()
        made = maker(noise)
        on_made = bce(critic(made.detach()), 0.0)
        on_made.backward()
        critic_optimizer.step()
        maker.zero_grad()
        loss = bce(critic(made), 1.0)
        loss.backward()
        maker_optimizer.step()
        run.log(on_real, on_made, loss)
    run.log(maker, critic)


@idiom(
    "switches requires_grad of one model off while the other trains, and penalises the critic's gradient now and then",
    source="rosinality/stylegan2-pytorch train.py:172",
    bf16=False,
)
def switches_models_off(run: Run) -> None:
    def requires_grad(model: nn.Module, flag: bool) -> None:
        for p in model.parameters():
            p.requires_grad = flag

    maker, critic = Net(4, 5), Net(5, 1)
    maker_optimizer = run.hold(maker, torch.optim.AdamW(maker.parameters(), lr=1e-2, betas=(0.0, 0.99)))
    critic_optimizer = run.hold(critic, torch.optim.AdamW(critic.parameters(), lr=1e-2, betas=(0.0, 0.99)))
    for number, (noise, real) in enumerate(vector_batches(4, 5)):
        requires_grad(maker, False)
        requires_grad(critic, True)
        loss = F.softplus(critic(maker(noise)).float()).mean() + F.softplus(-critic(real).float()).mean()
        critic.zero_grad()
        loss.backward()
        critic_optimizer.step()
        run.log(loss)
        if number % 2 == 0:
            real.requires_grad = True
            judged = critic(real)
            (gradient,) = torch.autograd.grad(outputs=judged.sum(), inputs=real, create_graph=True)
            penalty = gradient.pow(2).reshape(len(gradient), -1).sum(1).mean()
            critic.zero_grad()
            (5 * penalty + 0 * judged[0]).sum().backward()
            critic_optimizer.step()
            run.log(penalty)
        requires_grad(maker, True)
        requires_grad(critic, False)
        loss = F.softplus(-critic(maker(noise)).float()).mean()
        maker.zero_grad()
        loss.backward()
        maker_optimizer.step()
        run.log(loss)
    run.log(maker, critic)


@idiom(
    "penalises a critic's gradient between real and made data, with a backward pass of its own",
    source="caogang/wgan-gp gan_mnist.py:209",
    bf16=False,
)
def wasserstein_with_gradient_penalty(run: Run) -> None:
    maker, critic = Net(4, 5), Net(5, 1, bias=False)
    maker_optimizer = run.hold(maker, torch.optim.AdamW(maker.parameters(), lr=3e-3))
    critic_optimizer = run.hold(critic, torch.optim.AdamW(critic.parameters(), lr=3e-3), accumulation=3)
    for noise, real in vector_batches(4, 5):
        for p in critic.parameters():
            p.requires_grad = True
        critic.zero_grad()
        on_real = -critic(real).mean()
        on_real.backward()
        with torch.no_grad():
            made = maker(noise)
        on_made = critic(made).mean()
        on_made.backward()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * made).requires_grad_()
        judged = critic(between)
        (gradient,) = torch.autograd.grad(
            judged, between, torch.ones_like(judged), create_graph=True, retain_graph=True, only_inputs=True
        )
        penalty = 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        penalty.backward()
        critic_optimizer.step()
        for p in critic.parameters():
            p.requires_grad = False
        maker.zero_grad()
        loss = -critic(maker(noise)).mean()
        loss.backward()
        maker_optimizer.step()
        run.log(on_real, on_made, penalty, loss)
    run.log(maker, critic)


@idiom(
    "trains an actor through a critic twice for each step of the critic, and a temperature with a plain optimizer",
    source="vwxyzjn/cleanrl cleanrl/sac_continuous_action.py:272",
)
def actor_and_critic(run: Run) -> None:
    actor, critic, target = Net(4, 2), Net(6, 1), Net(6, 1)
    target.load_state_dict(critic.state_dict())
    critic_optimizer = run.hold(critic, torch.optim.Adam(critic.parameters(), lr=1e-2), accumulation=2)
    actor_optimizer = run.hold(actor, torch.optim.Adam(actor.parameters(), lr=3e-3))
    target.to(next(critic.parameters()).dtype)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-2)
    for states, rewards in vector_batches(4, 1):
        dtype = next(critic.parameters()).dtype
        with torch.no_grad():
            actions = torch.tanh(actor(states))
            wanted = rewards + 0.9 * target(torch.cat([states, actions], dim=1).to(dtype)).float()
        loss = F.mse_loss(critic(torch.cat([states, actions], dim=1)).float(), wanted)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        run.log(loss)
        for _ in range(2):
            actions = torch.tanh(actor(states))
            spread = -actions.float().pow(2).mean()
            loss = (log_alpha.exp().detach() * -spread - critic(torch.cat([states, actions], dim=1)).float()).mean()
            actor_optimizer.zero_grad()
            loss.backward()
            actor_optimizer.step()
            alpha_loss = (-log_alpha.exp() * (spread.detach() + 0.5)).mean()
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()
            run.log(loss, alpha_loss)
        for param, slow in zip(critic.parameters(), target.parameters(), strict=True):
            slow.data.copy_(0.1 * param.data + 0.9 * slow.data)
    run.log(actor, critic, target)


@idiom(
    "several epochs over one batch in shuffled pieces, left early when the policy has moved too far",
    source="vwxyzjn/cleanrl cleanrl/ppo.py:292",
)
def policy_epochs(run: Run) -> None:
    model, optimizer = held_net(run, 5, 4)
    schedule = [1e-2 * (1 - number / 3) for number in range(3)]
    for number, (states, advantages) in enumerate(vector_batches(5, 1, 3, batch=8)):
        optimizer.param_groups[0]["lr"] = schedule[number]
        actions = torch.arange(8) % 3
        with torch.no_grad():
            before = model(states).float()[:, :3].log_softmax(1)[torch.arange(8), actions]
        for epoch in range(3):
            order = torch.randperm(8)
            for picked in order.split(4):
                outputs = model(states[picked]).float()
                now = outputs[:, :3].log_softmax(1)[torch.arange(4), actions[picked]]
                ratio = (now - before[picked]).exp()
                gain = advantages[picked, 0]
                policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
                loss = policy + 0.5 * (outputs[:, 3] - gain).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                run.log(loss, norm)
            if epoch == 1 and number == 1:
                break
    run.log(model)


# Scales of the loss, and precision.


@idiom(
    "has a GradScaler that does nothing, around each step",
    source="pytorch/examples distributed/minGPT-ddp/mingpt/trainer.py:106",
)
def disabled_scaler(run: Run) -> None:
    model, optimizer = held_lm(run)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for tokens, targets in token_batches():
        with torch.set_grad_enabled(True), torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = token_loss(model, tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        run.log(loss)
    run.log(model)


@idiom(
    "scales the loss, unscales the gradients, clips them and steps",
    source="speechbrain/speechbrain speechbrain/core.py:922",
    bf16=False,
)
def enabled_scaler(run: Run) -> None:
    model, optimizer = held_lm(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.log(loss, norm, scaler.get_scale())
    run.log(model)


@idiom(
    "writes a NaN into a gradient, whose step the GradScaler skips",
    source="huggingface/accelerate tests/test_optimizer.py:60",
    bf16=False,
)
def scaler_skips_nan(run: Run) -> None:
    model, optimizer = held_lm(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        scaler.scale(loss).backward()
        if number == 1:
            model.head.weight.grad[0] = torch.tensor(float("nan"))
        if number == 4:
            for p in model.norm.parameters():
                p.grad.fill_(0.01 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        run.log(loss, scaler.get_scale())
    run.log(model)


@idiom(
    "runs the forward under autocast to bf16, the parameters being fp32",
    source="pytorch/examples distributed/minGPT-ddp/mingpt/trainer.py:100",
    bf16=False,
)
def autocast_to_bf16(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Only roughly: a last bit of a weight may turn one of its bf16 value.
        run.log(round(loss.item(), 2), logits.dtype is torch.bfloat16)
    run.log(torch.stack([p.detach().norm() for p in model.parameters()]).norm().round(decimals=2))


# Schedules and param groups.


@idiom(
    "has a one-cycle schedule, which changes betas, too",
    source="huggingface/accelerate examples/cv_example.py:140",
)
def one_cycle(run: Run) -> None:
    model = TinyLm()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, epochs=2, steps_per_epoch=3)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.log(loss, schedule.get_last_lr()[0], optimizer.param_groups[0]["betas"][0])
    run.log(model)


@idiom(
    "warms up linearly, then follows a cosine",
    source="Lightning-AI/litgpt litgpt/finetune/adapter.py:448",
)
def warm_up_then_cosine(run: Run) -> None:
    model, optimizer = held_lm(run)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.log(loss, schedule.get_last_lr()[0])
    run.log(model)


@idiom(
    "evaluates in between, and lowers the rate when that does not improve",
    source="facebookresearch/DomainBed domainbed/algorithms.py:178",
)
def lowers_rate_on_plateau(run: Run) -> None:
    model, optimizer = held_lm(run)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=0, threshold=1.0)
    other = list(token_batches(2, seed=9))
    for tokens, targets in token_batches():
        model.train()
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found = sum(token_loss(model, *batch) for batch in other) / 2
        schedule.step(found)
        run.log(loss, found, optimizer.param_groups[0]["lr"])
    run.log(model)


@idiom(
    "writes learning rate and weight decay into the groups at each step",
    source="facebookresearch/dino main_dino.py:310",
)
def writes_into_groups(run: Run) -> None:
    model = TinyLm()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = run.hold(model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    for number, (tokens, targets) in enumerate(token_batches()):
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * number / STEPS))
            if index == 0:
                group["weight_decay"] = 0.04 + 0.1 * number
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss, optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"])
    run.log(model)


@idiom(
    "scales the learning rate with the length of each sequence, and puts it back after the step",
    source="salesforce/awd-lstm-lm main.py:211",
)
def rate_by_sequence_length(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        length = LENGTH - number % 3
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * length / LENGTH
        optimizer.zero_grad()
        loss = token_loss(model, tokens[:, :length], targets[:, :length])
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        run.log(loss)
    run.log(model)


@idiom(
    "freezes the blocks, and frees them one after the other",
    source="Lightning-AI/pytorch-lightning examples/pytorch/domain_templates/computer_vision_fine_tuning.py:77",
)
def frees_blocks_gradually(run: Run) -> None:
    model, optimizer = held_lm(run)
    model.blocks.requires_grad_(False)
    for number, (tokens, targets) in enumerate(token_batches()):
        if number in (1, 3, 4):
            model.blocks[-{1: 1, 3: 2, 4: 3}[number]].requires_grad_(True)
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss, sum(p.grad is None for p in model.parameters()))
    run.log(model)


@idiom(
    "frees the blocks by adding them to the optimizer",
    source="Lightning-AI/pytorch-lightning examples/pytorch/domain_templates/computer_vision_fine_tuning.py:82",
    refused=dict.fromkeys(PLACEMENTS, FIXED),
)
def frees_blocks_as_a_new_group(run: Run) -> None:
    model = TinyLm()
    model.blocks.requires_grad_(False)
    optimizer = run.hold(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    for number, (tokens, targets) in enumerate(token_batches()):
        if number == 3:
            model.blocks.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 1e-3})
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss)
    run.log(model)


# Evaluation, errors, ends.


@idiom("evaluates between steps, with dropout in training", source="karpathy/nanoGPT train.py:216")
def evaluates_between(run: Run) -> None:
    model = Net(5, 3, p=0.3)
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    @torch.no_grad()
    def estimate() -> Tensor:
        model.eval()
        losses = torch.zeros(2)
        for number, batch in enumerate(vector_batches(5, 3, 2, seed=7)):
            losses[number] = vector_loss(model, *batch).item()
        model.train()
        return losses.mean()

    for number, (inputs, targets) in enumerate(vector_batches(5, 3)):
        if number % 2 == 0:
            run.log(estimate())
        optimizer.zero_grad()
        loss = vector_loss(model, inputs, targets)
        loss.backward()
        if number == 3:
            run.log(estimate())  # between backward and step
        optimizer.step()
        with torch.inference_mode():
            run.log(loss, model(inputs).float().clone())
    run.log(estimate(), model)


class OutOfMemory(nn.Module):
    """Raises as a device does. Attribute: is_full."""

    is_full = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_full:
            raise RuntimeError("device out of memory")
        return x


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("device out of memory")


@idiom(
    "drops a batch whose forward or backward ran out of memory, and goes on",
    source="facebookresearch/fairseq fairseq/trainer.py:881",
)
def goes_on_after_errors(run: Run) -> None:
    model = Net(5, 3, blocks=3)
    model.blocks.insert(2, OutOfMemory())
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    failing: dict[str, Any] = {}
    model.blocks[1].register_forward_hook(lambda *args: Failing.apply(args[2]) if failing else None)
    for number, (inputs, targets) in enumerate(vector_batches(5, 3)):
        model.blocks[2].is_full = number == 1
        if number == 3:
            failing["now"] = True
        try:
            optimizer.zero_grad()
            loss = vector_loss(model, inputs, targets)
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            failing.clear()
            optimizer.zero_grad()
            run.log(-1)
            continue
        run.log(loss)
    run.log(model)


@idiom(
    "leaves out the step of batches whose loss or norm is not finite",
    source="facebookresearch/fairseq fairseq/trainer.py:970",
)
def leaves_out_bad_batches(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        if number == 1:
            loss = loss * float("nan")
        if not torch.isfinite(loss):
            continue
        (loss * (1e38 if number == 3 else 1)).mul(10 if number == 3 else 1).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        run.log(loss, bool(torch.isfinite(norm)))
    run.log(model)


@idiom(
    "keeps the best state so far, and returns to it when it stops early",
    source="locuslab/fast_adversarial CIFAR10/train_fgsm.py:140",
)
def stops_early(run: Run) -> None:
    model, optimizer = held_net(run)
    best, patience = math.inf, 0
    kept = copy.deepcopy(model.state_dict())
    check = next(vector_batches(5, 3, 1, seed=5))
    for number, (inputs, targets) in enumerate(vector_batches(5, 3)):
        optimizer.zero_grad()
        loss = vector_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            found = vector_loss(model.eval(), *check).item() + (0 if number < 3 else 100)
        model.train()
        run.log(loss, found)
        if found < best:
            best, patience = found, 0
            kept = copy.deepcopy(model.state_dict())
        else:
            patience += 1
            if patience == 2:
                break
    model.load_state_dict(kept)
    run.log(vector_loss(model, *check), model)


@idiom(
    "hangs an average of the weights on the optimizer, as a hook after each step",
    source="lucidrains/ema-pytorch ema_pytorch/ema_pytorch.py:200",
)
def hook_after_the_step(run: Run) -> None:
    model, optimizer = held_lm(run)
    slow = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    calls: list[str] = []

    def average(*_: Any) -> None:
        for name, p in model.named_parameters():
            slow[name].lerp_(p.detach().float(), 0.2)

    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = optimizer.register_step_post_hook(average)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss, len(calls), slow)
    handle.remove()
    run.log(model)
