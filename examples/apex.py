"""Train DQN with actors in other processes, which fill one prioritized buffer (Ape-X).

CartPole takes about a minute on two CPU cores. Some things to try:
  --actors 8                      more processes, which wait for the learner if it is slower
  --resume --steps 200_000        train a finished run for longer

Ends with a table. Writes, in runs/apex or where --out says:
  learning_curve.png  return while training
  log.csv             fifty times in a run: returns, losses, how long each side waited
"""

import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, PyTree

import common
import jaxbuf
from dqn import PRIORITY_EPSILON, QNetwork
from jaxbuf.core.signals import DeferredSignals
from jaxbuf.interop import gymnasium_transitions, transition_like
from sac import Returns, play

CHUNKS = 50
PUBLISH = 4  # updates after which actors are sent the parameters
# Other start methods copy a process in which JAX has threads already, and these hold locks.
SPAWN = multiprocessing.get_context("spawn")
make_envs = functools.partial(gymnasium.make_vec, vectorization_mode="sync")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the training."""

    env: Literal["CartPole-v1", "Acrobot-v1", "MountainCar-v0"] = "CartPole-v1"  # of Gymnasium
    actors: int = 2  # processes that act
    num_envs: int = 4  # environments side by side in each of them
    rollout: int = 16  # steps of them that an actor sends at a time
    seed: int = 0  # source of all randomness, except for the order in which actors are heard
    steps: int = 100_000  # environment steps of all actors
    samples_per_insert: float = 8.0  # how often each transition is drawn on average
    batch_size: int = 128  # transitions in an update
    n_step: int = 3  # rewards in a target before it bootstraps
    capacity: int = 50_000  # transitions in the buffer
    warmup: int = 2_000  # transitions before learning begins
    alpha: float = 0.6  # priority exponent; 0 is uniform
    beta: float = 0.4  # importance exponent
    lr: float = 1e-3  # learning rate, annealed linearly to zero
    discount: float = 0.99  # discount per step
    sampler: ClassVar[str] = "prioritized"

    def __post_init__(self) -> None:
        common.check(self, 1, "actors", "num_envs", "rollout", "n_step", "batch_size")
        common.check(self, 0, "seed", "alpha", "lr")
        common.check(self, 1e-3, "samples_per_insert")
        common.check(self, 0, "beta", "discount", high=1)
        common.check(self, max(self.batch_size, self.num_envs * self.rollout), "warmup", "capacity")
        common.check(self, self.warmup + 1, "steps")


class Learner(struct.PyTreeNode):
    """The state of the learner, which is saved in checkpoints along with the buffer."""

    params: PyTree
    target_params: PyTree  # their moving average, which the targets use
    opt_state: optax.OptState
    keys: PRNGKeyArray  # of the next batch, and of all later randomness, [2]
    step: Int[Array, ""]  # environment steps that it has learned from


class Agent:
    """Double DQN with n-step targets; actors compute the first priorities (Horgan et al., 2018)."""

    def __init__(self, config: Config, envs: Any) -> None:
        self.config, self.like = config, transition_like(envs)
        self.network: Any = QNetwork(int(envs.single_action_space.n), 64)
        self.length = math.ceil((config.steps - config.warmup) / CHUNKS)  # environment steps
        self.updates = max(round(self.length * config.samples_per_insert / config.batch_size), 1)
        schedule = optax.linear_schedule(config.lr, 0.0, CHUNKS * self.updates)
        self.optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))

    def init(self) -> dict[str, PyTree]:
        """Returns a learner with a new network, an empty buffer, and its limiter."""
        config = self.config
        keys = jax.random.split(jax.random.key(config.seed), 3)
        params = self.network.init(keys[0], jnp.zeros((1, *self.like["obs"].shape)))
        opt_state = self.optimizer.init(params)
        learner = Learner(params, params, opt_state, keys[1:], jnp.int32(config.warmup))
        item = {name: self.like[name] for name in ("obs", "action", "reward", "next_obs")}
        item["discount"] = item["reward"]
        sampler = jaxbuf.Prioritized(alpha=config.alpha, epsilon=PRIORITY_EPSILON)
        buffer = jaxbuf.ItemBuffer.create(item, config.capacity, sampler=sampler)
        ratio, message = config.samples_per_insert, config.num_envs * config.rollout
        tolerance = 2 * (ratio * message + config.batch_size)
        limiter = jaxbuf.RateLimiter.create(ratio, config.warmup, tolerance)
        return {"learner": learner, "buffer": buffer, "limiter": limiter}

    @functools.partial(jax.jit, static_argnums=0)
    def act(self, params: PyTree, obs: Array, epsilon: ArrayLike, key: PRNGKeyArray) -> Array:
        """Returns ε-greedy actions for E observations, ``[E]``."""
        greedy = jnp.argmax(self.network.apply(params, obs), axis=-1).astype(jnp.int32)
        explore_key, action_key = jax.random.split(key)
        anything = jax.random.randint(action_key, greedy.shape, 0, self.network.num_actions)
        return jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, anything, greedy)

    @functools.partial(jax.jit, static_argnums=0)
    def rows(self, params: PyTree, window: dict[str, Array]) -> dict[str, PyTree]:
        """Returns arguments of ``add`` for the first T steps of a window, ``[E, T + n]``."""
        returns = jaxbuf.n_step(window, self.config.n_step, self.config.discount)
        items = {name: window[name][:, : self.config.rollout] for name in ("obs", "action", "mask")}
        # The last step of each return, whose "next_obs" is in the same episode.
        last = returns.bootstrap_index[..., None] - 1
        items["next_obs"] = jnp.take_along_axis(window["next_obs"], last, axis=1)
        items |= {"reward": returns.reward, "discount": returns.discount}
        items = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), items)
        priority = jnp.abs(self.td_error(params, params, items))
        return {"mask": items.pop("mask"), "items": items, "priority": priority}

    def td_error(self, params: PyTree, target_params: PyTree, items: PyTree) -> Float[Array, " B"]:
        """Returns value minus n-step target; ``params`` choose the next action (double DQN)."""
        row = jnp.arange(len(items["action"]))
        value = self.network.apply(params, items["obs"])[row, items["action"]]
        best = jnp.argmax(self.network.apply(params, items["next_obs"]), axis=-1)
        next_value = self.network.apply(target_params, items["next_obs"])[row, best]
        return value - jax.lax.stop_gradient(items["reward"] + items["discount"] * next_value)

    @functools.partial(jax.jit, static_argnums=0)
    def learn(self, learner: Learner, items: PyTree, weight: Array) -> tuple[Learner, Array, Array]:
        """Updates the network and its target once; also returns the new priorities and the loss."""

        def loss_fn(params: PyTree) -> tuple[Array, Array]:
            error = self.td_error(params, learner.target_params, items)
            return 0.5 * jnp.mean(weight * error**2), error

        (loss, error), grads = jax.value_and_grad(loss_fn, has_aux=True)(learner.params)
        updates, opt_state = self.optimizer.update(grads, learner.opt_state)
        params: PyTree = optax.apply_updates(learner.params, updates)
        target = optax.incremental_update(params, learner.target_params, 0.01)
        learner = learner.replace(params=params, target_params=target, opt_state=opt_state)
        return learner.replace(keys=jax.random.split(learner.keys[1])), jnp.abs(error), loss


def act(config: Config, actor: int, seed: int, params: PyTree, queues: Sequence[Any]) -> None:
    """Acts in a process of its own, until the learner's process ends.

    Sends arguments of ``add`` to the queue ``rows``, which is bounded, so a fast actor waits there,
    and the returns of episodes to ``returns``. New parameters arrive in its ``mailbox``.
    """
    rows, returns, mailbox = queues
    learner: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (learner.join(), os._exit(1)), daemon=True).start()
    jax.config.update("jax_platforms", "cpu")  # leaves the accelerator to the learner
    envs, count = make_envs(config.env, config.num_envs), config.num_envs
    agent, key = Agent(config, envs), jax.random.key(seed)
    # Each environment of each actor has an epsilon of its own, from 0.4 to 0.0007.
    rank = np.arange(actor * count, (actor + 1) * count) / max(config.actors * count - 1, 1)
    epsilon = (0.4 ** (1 + 7 * rank)).astype(np.float32)
    (obs, _), ended, steps, episodes = envs.reset(seed=seed), None, [], Returns(count)
    while True:
        while not mailbox.empty():
            params = mailbox.get()
        while len(steps) < config.rollout + config.n_step:
            key, action_key = jax.random.split(key)
            action = np.array(agent.act(params, obs, epsilon, action_key))
            step = gymnasium_transitions(envs, obs, action, envs.step(action), ended)
            episodes.add(step.transitions["reward"], step.ended)
            steps.append({**step.transitions, "mask": step.mask})  # resets are no transitions
            obs, ended = step.obs, step.ended
        window = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *steps)
        rows.put(jax.device_get(agent.rows(params, window)))
        returns.put(episodes.mean())
        # The last n steps have no n-step return yet, so they begin the next window.
        steps = steps[config.rollout :]


def train(run: common.Run[Config]) -> None:
    """Trains, and prints the result."""
    config, agent = run.config, Agent(run.config, make_envs(run.config.env, 1))
    saved = run.begin(agent.init)
    done, count = int(saved["learner"].step), config.actors
    seeds = np.random.SeedSequence([config.seed, done]).generate_state(count) >> 1
    rows, returns, *mailboxes = (SPAWN.Queue(2 * count), *(SPAWN.Queue() for _ in range(count + 1)))
    params = jax.device_get(saved["learner"].params)
    args = [(config, i, int(seeds[i]), params, (rows, returns, mailboxes[i])) for i in range(count)]
    actors = [SPAWN.Process(None, act, f"actor {i}", args[i], daemon=True) for i in range(count)]

    def chunk(saved: dict[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, PyTree], str]:
        learner, losses = saved["learner"], []
        for update in range(agent.updates):
            key, size = learner.keys[0], config.batch_size
            batch = holder.sample(key, size, beta=config.beta)
            learner, priority, loss = agent.learn(learner, batch.data, batch.weights)
            holder.update_priority(batch.slots, priority)
            losses.append(loss)
            if update % PUBLISH == 0:
                for mailbox in (m for m in mailboxes if m.empty()):
                    mailbox.put(jax.device_get(learner.params))
        episodes = [returns.get() for _ in iter(returns.empty, True)]
        finished = [mean for mean in episodes if not math.isnan(mean)]
        log = {"return": np.mean(finished) if finished else math.nan, "loss": np.mean(losses)}
        learner = learner.replace(step=learner.step + agent.length)
        # Both at once, so that the limiter counts those rows that the buffer has.
        buffer, limiter = holder.read(lambda b: (jax.tree.map(jnp.copy, b), holder.limiter))
        saved = {"learner": learner, "buffer": buffer, "limiter": limiter}
        log |= {"holder": holder.metrics(), "buffer": buffer.metrics()}
        return saved, log, common.mean_return(log["return"])

    try:
        # Ctrl-C waits until all actors have begun, and does not reach them, since a process
        # inherits that a signal is blocked.
        with DeferredSignals():
            old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for actor in actors:
                actor.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        with jaxbuf.Holder(saved["buffer"], limiter=saved["limiter"]) as holder:
            jaxbuf.feed(holder, rows, actors)
            saved, took = run.train(saved, chunk, done=done, until=config.steps, size=agent.length)
    except jaxbuf.Stopped as stopped:
        sys.exit(f"error: {stopped.__cause__}; go on from the last checkpoint with --resume")
    finally:
        for actor, mailbox in zip(actors, mailboxes, strict=True):
            actor.terminate()
            actor.join()
            mailbox.cancel_join_thread()  # this process can end before it is empty
    envs, params, key = make_envs(config.env, 32), saved["learner"].params, jax.random.key(0)
    greedy = play(envs, lambda obs: agent.act(params, obs, 0.0, key), config.seed)
    run.report_returns("Ape-X DQN", greedy[None], took, agent.length)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this example from the command line and returns its exit status."""
    return common.main("apex", train, Config(), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
