"""Ways of reading, changing, replacing and dropping `p.grad` between backward and step, and of hooking into it."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle.harness import STEPS, Run, idiom
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

CONSUMED = "gradients in slots are gone after step(), but for their norms"


# Torch's own functions.


@idiom(
    "clips by the largest gradient, one tensor after the other",
    source="Lightning-AI/pytorch-lightning src/lightning/fabric/strategies/strategy.py:386",
)
def clip_by_infinity_norm(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"), foreach=False)
        optimizer.step()
        run.log(loss, norm)
    run.log(model)


@idiom(
    "clips by the sum of magnitudes, all tensors at once",
    source="huggingface/pytorch-image-models timm/utils/clip_grad.py:16",
)
def clip_by_one_norm(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), 3.0, norm_type=1.0, foreach=True)
        optimizer.step()
        run.log(loss, norm)
    run.log(model)


@idiom(
    "lets clipping raise on a gradient that is not finite, drops that batch and goes on",
    source="Lightning-AI/pytorch-lightning src/lightning/fabric/fabric.py:579",
)
def clip_raises_on_nonfinite(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        (loss * float("inf") if number == 2 else loss).backward()
        dropped = False
        try:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError:
            dropped = True
        else:
            optimizer.step()
            run.log(norm)
        run.log(loss, dropped)
    run.log(model)


@idiom(
    "does not clip, but asks for the norm with an infinite limit in order to log it",
    source="huggingface/transformers src/transformers/trainer.py:2788",
)
def norm_with_infinite_limit(run: Run) -> None:
    model, optimizer = held_lm(run)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    model.zero_grad()
    for tokens, targets in token_batches():
        model.train()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"), norm_type=2)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        run.log(loss, norm.item(), schedule.get_last_lr()[0])
    run.log(model)


@idiom("clips each value", source="huggingface/accelerate src/accelerate/accelerator.py:3034")
def clip_by_value(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
    run.log(model)


@idiom(
    "asks for the norm of all gradients first, and scales them by it in a second call",
    source="pytorch/torchtitan torchtitan/distributed/utils.py:648",
)
def clip_in_two_calls(run: Run) -> None:
    model, optimizer = held_lm(run)
    params = list(model.parameters())
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], 2.0, False, True)
        torch.nn.utils.clip_grads_with_norm_(params, 0.3, norm, True)
        optimizer.step()
        run.log(loss, norm)
    run.log(model)


@idiom(
    "clips what the optimizer's groups hold, each group by itself",
    source="speechbrain/speechbrain speechbrain/core.py:929",
)
def clip_each_group(run: Run) -> None:
    model = TinyLm()
    inner = [p for name, p in model.named_parameters() if name.startswith("blocks")]
    outer = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    groups = [{"params": inner, "lr": 1e-2}, {"params": outer, "lr": 3e-3}]
    optimizer = run.hold(model, torch.optim.AdamW(groups))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        norms = [torch.nn.utils.clip_grad_norm_(group["params"], 0.2) for group in optimizer.param_groups]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.log(loss, *norms)
    run.log(model)


# Reading.


@idiom(
    "notes the norm of each gradient by name, and the norm of those",
    source="Lightning-AI/pytorch-lightning src/lightning/pytorch/utilities/grads.py:46",
)
def norm_of_each_parameter(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        norms = {f"grad/{name}": p.grad.data.norm(2.0) for name, p in model.named_parameters() if p.grad is not None}
        run.log(loss, norms, torch.tensor(list(norms.values())).norm(2.0))
        optimizer.step()
    run.log(model)


@idiom(
    "sums the squares of the norms as Python numbers",
    source="microsoft/Swin-Transformer utils.py:157",
)
def total_norm_of_items(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        total = 0.0
        for p in filter(lambda p: p.grad is not None, model.parameters()):
            total += p.grad.data.norm(2).item() ** 2
        optimizer.step()
        run.log(loss, total**0.5)
    run.log(model)


@idiom(
    "stacks the norms of detached gradients, on the device of the first of them",
    source="microsoft/Swin-Transformer utils.py:194",
)
def total_norm_of_stack(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        device = grads[0].device
        largest = max(g.detach().abs().max().to(device) for g in grads)
        run.log(loss, largest, torch.norm(torch.stack([torch.norm(g.detach(), 2.0).to(device) for g in grads]), 2.0))
        optimizer.step()
    run.log(model)


@idiom(
    "logs the norm of each gradient per element",
    source="huggingface/diffusers examples/vqgan/train_vqgan.py:198",
)
def norm_per_element(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                values = p.grad.detach().data
                run.log((values.norm(p=2) / values.numel()).item())
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
    run.log(model)


@idiom(
    "logs how the mean magnitude of the gradients flows through the layers",
    source="pytorch/ignite ignite/handlers/tensorboard_logger.py:652",
)
def mean_magnitudes(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        weights = [(name, p) for name, p in model.named_parameters() if p.requires_grad and "bias" not in name]
        run.log({name: p.grad.detach().abs().mean() for name, p in weights})
        run.log({name: p.grad.abs().max() for name, p in weights})
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "logs the norms of the gradients when the iteration is over, after the step",
    source="pytorch/ignite ignite/handlers/tensorboard_logger.py:632",
)
def norms_after_the_step(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss, *[torch.norm(p.grad) for p in model.parameters()])
    run.log(model)


@idiom(
    "logs the values of the gradients when the iteration is over, after the step",
    source="pytorch/ignite ignite/handlers/tensorboard_logger.py:709",
    refused={"nvme": CONSUMED},
)
def values_after_the_step(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss, *[p.grad.mean() for p in model.parameters()])
    run.log(model)


@idiom(
    "follows how important each weight is, by the new weight and the gradient that the step has used",
    source="huggingface/peft src/peft/tuners/adalora/layer.py:243",
    refused={"nvme": CONSUMED},
)
def importance_after_the_step(run: Run) -> None:
    model, optimizer = held_lm(run)
    importance = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in model.named_parameters()}
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                importance[name].lerp_((param * param.grad).abs().detach().float(), 0.15)
        optimizer.zero_grad()
        run.log(loss, *importance.values())
    run.log(model)


@idiom(
    "draws a histogram of each gradient with NumPy",
    source="pytorch/ignite ignite/handlers/tensorboard_logger.py:729",
    bf16=False,
)
def histograms_in_numpy(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for p in model.parameters():
            values = p.grad.cpu().numpy()
            counts, _ = np.histogram(values, bins=[-1e9, -0.1, 0.1, 1e9])
            run.log(int(counts.sum()), values.mean(dtype=np.float64), values.std(dtype=np.float64))
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "looks for NaN and Inf before it clips",
    source="huggingface/diffusers examples/controlnet/train_controlnet_flux.py:1341",
)
def looks_for_nan(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        bad = [n for n, p in model.named_parameters() if p.grad is not None and torch.isnan(p.grad).any()]
        bad += [n for n, p in model.named_parameters() if p.grad is not None and p.grad.isinf().any()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.log(loss, len(bad))
    run.log(model)


@idiom(
    "counts the zeros of the gradients",
    source="NVIDIA/Megatron-LM megatron/core/optimizer/clip_grads.py:254",
)
def counts_zeros(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches(batch=1):
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        zeros = torch.zeros(1)
        for p in model.parameters():
            grad = p.grad.detach()
            zeros += grad.numel() - torch.count_nonzero(grad)
        run.log(loss, zeros, (model.embedding.weight.grad == 0).sum(), model.embedding.weight.grad.ne(0).any(1).sum())
        optimizer.step()
    run.log(model)


@idiom(
    "logs how large updates are beside their weights",
    source="karpathy/nn-zero-to-hero lectures/makemore/makemore_part3_bn.ipynb:534",
)
def ratio_of_update_to_weight(run: Run) -> None:
    model, optimizer = held_lm(run)
    weights = [p for p in model.parameters() if p.ndim == 2]
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        with torch.no_grad():
            lr = optimizer.param_groups[0]["lr"]
            run.log(loss, *[((lr * p.grad).float().std() / p.data.float().std()).log10().item() for p in weights])
        optimizer.step()
    run.log(model)


@idiom(
    "asks gradients what they are: a tensor, dense, of the parameter's shape, dtype and device, without a graph",
    source="facebookresearch/fairseq fairseq/distributed/legacy_distributed_data_parallel.py:144",
)
def asks_what_gradients_are(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad.requires_grad or p.grad.is_sparse:
                raise RuntimeError("gradients with a graph or without all values cannot be reduced")
            same = p.grad.dtype == p.dtype and p.grad.device == p.device and p.grad.layout == p.layout
            run.log(isinstance(p.grad, Tensor), same, *p.grad.shape, p.grad.numel(), p.grad.dim(), *p.grad.size())
            run.log(p.grad.is_floating_point(), p.grad.element_size() == p.element_size(), len(p.grad))
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
    run.log(model)


@idiom(
    "collects all gradients in one vector, and logs its cosine with the step before's",
    source="facebookresearch/GradientEpisodicMemory model/gem.py:47",
)
def cosine_with_last_gradient(run: Run) -> None:
    model, optimizer = held_lm(run)
    store = torch.zeros(sum(p.numel() for p in model.parameters()), 2)
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        begin = 0
        for p in model.parameters():
            end = begin + p.numel()
            store[begin:end, number % 2].copy_(p.grad.data.view(-1))
            begin = end
        run.log(loss, F.cosine_similarity(store[:, 0], store[:, 1], dim=0), torch.mm(store.t(), store))
        optimizer.step()
    run.log(model)


@idiom(
    "measures the Fisher information with a backward pass of its own, and penalises leaving those weights",
    source="facebookresearch/GradientEpisodicMemory model/ewc.py:88",
)
def fisher_information_of_gradients(run: Run) -> None:
    model, optimizer = held_lm(run)
    fisher: list[Tensor] = []
    anchors: list[Tensor] = []
    for number, (tokens, targets) in enumerate(token_batches()):
        if number == 3:
            model.zero_grad()
            token_loss(model, tokens, targets).backward()
            fisher = [p.grad.data.clone().pow(2) for p in model.parameters()]
            anchors = [p.data.clone() for p in model.parameters()]
        model.zero_grad()
        loss = token_loss(model, tokens, targets)
        for importance, anchor, p in zip(fisher, anchors, model.parameters(), strict=False):
            loss = loss + 10 * (importance * (p - anchor).pow(2)).sum()
        loss.backward()
        optimizer.step()
        run.log(loss)
    run.log(*fisher, model)


# Changing in place.


@idiom("clamps the values of each gradient", source="qfettes/DeepRL-Tutorials agents/DQN.py:144")
def clamps_gradients(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = 50 * token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            param.grad.data.clamp_(-1, 1)
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "clips each gradient to a norm of its own",
    source="facebookresearch/dino utils.py:140",
)
def clip_each_parameter(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                norm = p.grad.data.norm(2)
                run.log(norm.item())
                factor = 0.05 / (norm + 1e-6)
                if factor < 1:
                    p.grad.data.mul_(factor)
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "sums the gradients of several tasks, and divides them by their number before the step",
    source="learnables/learn2learn examples/vision/maml_omniglot.py:128",
)
def averages_over_tasks(run: Run) -> None:
    tasks = 3
    model, optimizer = held_lm(run, accumulation=tasks)
    for meta in range(STEPS):
        optimizer.zero_grad()
        for tokens, targets in token_batches(tasks, seed=meta):
            loss = token_loss(model, tokens, targets)
            loss.backward()
            run.log(loss)
        for p in model.parameters():
            p.grad.data.mul_(1.0 / tasks)
        optimizer.step()
    run.log(model)


@idiom(
    "divides gradients with an augmented assignment",
    source="pytorch/opacus opacus/optimizers/optimizer.py:497",
)
def divides_with_assignment(run: Run) -> None:
    model, optimizer = held_lm(run, accumulation=2)
    for number in range(STEPS):
        for tokens, targets in token_batches(2, seed=number):
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten(), reduction="sum")
            loss.backward()
            run.log(loss)
        for p in model.parameters():
            p.grad /= 2 * 4 * LENGTH
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    run.log(model)


@idiom(
    "multiplies all gradients at once by one over the number of tokens, a tensor",
    source="facebookresearch/fairseq fairseq/optim/fairseq_optimizer.py:116",
)
def multiplies_by_token_count(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        targets = targets.masked_fill(targets % (number + 2) == 0, -100)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        count = (targets != -100).sum()
        torch._foreach_mul_([p.grad.data for p in model.parameters() if p.grad is not None], 1.0 / count)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        run.log(loss, count, norm)
    run.log(model)


@idiom(
    "adds noise to the gradients",
    source="sieu-n/awesome-modular-pytorch-lightning algorithms/gradient_noise.py:24",
)
def adds_noise(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad += torch.randn_like(param.grad) * 0.01
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "trains the embeddings of new tokens only: zeroes the other rows of the gradient",
    source="huggingface/diffusers examples/custom_diffusion/train_custom_diffusion.py:1203",
)
def trains_some_rows(run: Run) -> None:
    model, optimizer = held_lm(run)
    frozen = torch.arange(VOCABULARY) < VOCABULARY - 3
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        grads = model.embedding.weight.grad
        grads.data[frozen, :] = grads.data[frozen, :].fill_(0)
        model.head.weight.grad[:, [0, 3]].zero_()  # a copy: nothing happens, as in torch
        model.head.weight.grad[:, 2:4].zero_()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
    run.log(model)


@idiom(
    "writes to rows and to single elements of gradients, through views",
    source="NVIDIA/apex apex/contrib/test/clip_grad/test_clip_grad.py:129",
)
def writes_through_views(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        model.embedding.weight.grad[0] = 0
        model.head.weight.grad.view(-1)[0] = 1.5
        model.blocks[1].up.weight.grad.t()[:, 1].fill_(0.25)
        first = model.blocks[0].down.bias.grad[:2]
        first.mul_(3)
        model.norm.weight.grad[-1] += 0.5
        model.blocks[2].up.bias.grad.detach()[1:3] -= 0.125
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
    run.log(model)


@idiom(
    "keeps pruned weights at zero: multiplies their gradients by a mask",
    source="Eric-mingjie/rethinking-network-pruning cifar/lottery-ticket/l1-norm-pruning/main_lottery.py:162",
)
def masks_gradients(run: Run) -> None:
    model = TinyLm()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(module.weight.abs() > 0.15)
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                mask = module.weight.data.abs().clone().gt(0).float()
                module.weight.grad.data.mul_(mask)
        optimizer.step()
        run.log(loss, (model.head.weight == 0).sum())
    run.log(model)


@idiom(
    "takes gradients to NumPy, masks them there and puts the result into `p.grad.data`",
    source="rahulvigneswaran/Lottery-Ticket-Hypothesis-in-Pytorch main.py:247",
    bf16=False,
)
def masks_in_numpy(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for name, p in model.named_parameters():
            if "weight" in name:
                weight = p.data.cpu().numpy()
                grad = p.grad.data.cpu().numpy()
                p.grad.data = torch.from_numpy(np.where(np.abs(weight) < 0.1, 0, grad))
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "adds the gradient of an L1 penalty by hand",
    source="Eric-mingjie/rethinking-network-pruning cifar/lottery-ticket/l1-norm-pruning/main.py:139",
)
def adds_sign_of_weights(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.grad.data.add_(1e-3 * torch.sign(module.weight.data))
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "takes the mean out of each gradient",
    source="Yonghongwei/Gradient-Centralization GC_code/CIFAR100/algorithm/Adam.py:72",
)
def centralises_gradients(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        for name, p in model.named_parameters():
            grad = p.grad.data
            if grad.dim() > 1 and "head" not in name:
                grad.add_(-grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "clips each row of a gradient in proportion to its weights",
    source="huggingface/pytorch-image-models timm/utils/agc.py:30",
)
def adaptive_clipping(run: Run) -> None:
    def unitwise(x: Tensor) -> Tensor:
        return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            grad = p.grad.detach()
            limit = unitwise(p.detach()).clamp_(min=1e-3).mul_(0.02)
            norm = unitwise(grad)
            clipped = torch.where(norm < limit, grad, grad * (limit / norm.clamp(min=1e-6)))
            p.grad.detach().copy_(clipped)
        optimizer.step()
        run.log(loss)
    run.log(model)


@idiom(
    "flattens all gradients, divides them by the number of ranks, and copies them back",
    source="vwxyzjn/cleanrl cleanrl/ppo_atari_multigpu.py:371",
)
def copies_back_from_flat(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
        begin = 0
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.copy_(flat[begin : begin + p.numel()].view_as(p.grad.data) / 2)
                begin += p.numel()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        run.log(loss, norm, flat.norm())
    run.log(model)


@idiom(
    "detaches the old gradients and fills them with zeros, instead of dropping them",
    source="openai/guided-diffusion guided_diffusion/fp16_util.py:138",
)
def zeroes_gradients_by_hand(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        if number % 3 == 1:  # what is left of such a step is decay and momentum
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
        optimizer.step()
        run.log(loss)
    run.log(model)


# Replacing and dropping.


@idiom(
    "drops the gradients of the head in the first steps",
    source="facebookresearch/dino utils.py:149",
)
def drops_some_gradients(run: Run) -> None:
    model, optimizer = held_lm(run)
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        if number < 3:
            for name, p in model.named_parameters():
                if "head" in name:
                    p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        run.log(loss, norm, sum(p.grad is None for p in model.parameters()))
    run.log(model)


class Gated(nn.Module):
    """A parameter whose gradient is not finite, beside others whose are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(3))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x)) + self.gate.sqrt()
        return out


@idiom(
    "drops the gradients that are not finite, and steps the others",
    source="speechbrain/speechbrain speechbrain/core.py:891",
)
def drops_nonfinite_gradients(run: Run) -> None:
    model = Gated()
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for inputs, targets in vector_batches(WIDTH, 3):
        loss = F.mse_loss(model(inputs).float(), targets)
        loss.backward()
        dropped = 0
        for param in model.parameters():
            if param.requires_grad and param.grad is not None and not torch.isfinite(param.grad).all():
                param.grad = None
                dropped += 1
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.log(loss, dropped)
    run.log(model)


@idiom(
    "computes gradients with autograd.grad and assigns them",
    source="learnables/learn2learn examples/vision/mamlpp/MAMLpp.py:88",
)
def assigns_gradients(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss, norm)
    run.log(model)


@idiom(
    "flattens all gradients, makes them finite, and assigns the pieces",
    source="NVlabs/stylegan3 training/training_loop.py:292",
)
def assigns_pieces_of_flat(run: Run) -> None:
    model, optimizer = held_lm(run, accumulation=2)
    model.requires_grad_(False)
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        model.requires_grad_(True)
        for tokens, targets in token_batches(2, seed=number):
            loss = token_loss(model, tokens, targets)
            loss.mul(0.5).backward()
            run.log(loss)
        model.requires_grad_(False)
        params = [p for p in model.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in params])
        torch.nan_to_num(flat, nan=0, posinf=1e5, neginf=-1e5, out=flat)
        for p, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = grad.reshape(p.shape)
        optimizer.step()
    run.log(model)


@idiom(
    "collects the gradients of two objectives, projects one on the other where they conflict, and assigns the mean",
    source="WeiChengTseng/Pytorch-PCGrad pcgrad.py:79",
)
def projects_conflicting_gradients(run: Run) -> None:
    model, optimizer = held_lm(run)
    for tokens, targets in token_batches():
        logits = model(tokens).float().flatten(0, 1)
        losses = [F.cross_entropy(logits, targets.flatten()), F.cross_entropy(logits, tokens.flatten())]
        collected = []
        for loss in losses:
            optimizer.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            collected.append(torch.cat([g.flatten() for g in grads]))
        projected = [g.clone() for g in collected]
        for mine, other in zip(projected, reversed(collected), strict=True):
            if (dot := torch.dot(mine, other)) < 0:
                mine -= dot * other / other.norm() ** 2
        merged, begin = torch.stack(projected).mean(dim=0), 0
        for p in model.parameters():
            p.grad = merged[begin : begin + p.numel()].view(p.shape).clone()
            begin += p.numel()
        optimizer.step()
        run.log(*losses, torch.dot(*collected))
    run.log(model)


@idiom(
    "makes gradients without a backward pass: how far a copy that trained elsewhere has gone",
    source="learnables/learn2learn examples/vision/reptile_miniimagenet.py:141",
)
def gradients_of_reptile(run: Run) -> None:
    tasks = 2
    model = TinyLm(2)
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for meta in range(STEPS):
        for p in model.parameters():
            p.grad = torch.zeros_like(p.data)
        for tokens, targets in token_batches(tasks, seed=meta):
            learner = TinyLm(2)
            learner.load_state_dict(copy.deepcopy(model.state_dict()))
            adapt = torch.optim.SGD(learner.parameters(), lr=0.1)
            loss = token_loss(learner, tokens, targets)
            loss.backward()
            adapt.step()
            run.log(loss)
            for p, adapted in zip(model.parameters(), learner.parameters(), strict=True):
                p.grad.data.add_(adapted.data, alpha=-1.0)
        for p in model.parameters():
            p.grad.data.mul_(1.0 / tasks).add_(p.data)
        optimizer.step()
    run.log(model)


# Hooks.


@idiom(
    "watches gradients with tensor hooks on the parameters",
    source="wandb/wandb wandb/integration/torch/wandb_torch.py:278",
)
def hooks_that_watch(run: Run) -> None:
    model = TinyLm()
    seen: dict[str, tuple[Tensor, ...]] = {}
    hooks = []
    for name, p in model.named_parameters():

        def note(grad: Tensor, name: str = name) -> None:
            flat = grad.data.reshape(-1).float()
            seen[name] = torch.histc(flat, bins=1, min=-1e6, max=1e6), flat.min(), flat.max(), flat.mean()

        hooks.append(p.register_hook(note))
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(model, tokens, targets)
        loss.backward()
        optimizer.step()
        run.log(loss)
        for name in sorted(seen):
            run.log(*seen[name])
        seen.clear()
    for hook in hooks:
        hook.remove()
    run.log(model)


@idiom(
    "scales the gradient of a parameter in a hook on it",
    source="facebookresearch/fairseq fairseq/modules/quantization/pq/modules/qconv.py:78",
)
def hook_that_scales(run: Run) -> None:
    model = TinyLm()
    counts = torch.arange(1, VOCABULARY + 1)
    model.embedding.weight.register_hook(lambda grad: grad / counts[:, None])
    model.blocks[1].up.weight.register_hook(lambda grad: grad * 0.5)
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for number, (tokens, targets) in enumerate(token_batches()):
        optimizer.zero_grad()
        if number == 3:
            model.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        loss = token_loss(model, tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(loss, norm)
    run.log(model)


@idiom(
    "averages gradients over ranks in hooks that run when one is accumulated",
    source="huggingface/transformers src/transformers/trainer.py:2651",
)
def hook_after_accumulation(run: Run) -> None:
    model = TinyLm()
    seen: list[tuple[str, Tensor]] = []
    for name, p in model.named_parameters():

        def average(param: Tensor, name: str = name) -> None:
            assert param.grad is not None
            param.grad.div_(2)
            seen.append((name, param.grad.norm()))

        p.register_post_accumulate_grad_hook(average)
    optimizer = run.hold(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens, targets in token_batches():
        loss = token_loss(model, tokens, targets)
        loss.backward()
        run.log(loss, dict(sorted(seen)))
        seen.clear()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        run.log(norm)
    run.log(model)
