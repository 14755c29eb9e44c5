/** Caches, and the calls that make them or score. Appends are fenced by the cache's length, so that none is applied twice. */

import { create, type DescMessage } from "@bufbuild/protobuf";

import {
  forwardRequest,
  itemOf,
  newRequestId,
  type PrefillItem,
  prefillRequest,
  type PrefillSettings,
  resultOf,
  type Scored,
  scoredOf,
  type ScoreItem,
  type ScoreSettings,
  type Tokens,
  tokensOf,
} from "./batches.js";
import type { CallOptions } from "./connection.js";
import { durationOf } from "./duration.js";
import { type Accept, acceptOf } from "./enums.js";
import { QuireError } from "./errors.js";
import {
  type DecodeRequestSchema,
  type DecodeResponse,
  type ForwardResponse,
  type ForwardVerifyResponse,
  ModelExecutorService,
  type PrefillResponse,
  PrefillResponseSchema,
} from "./gen/quire/v1/executor_pb.js";
import type { KvCacheHandle, SampledToken, StepOutput, VerifyRowSchema } from "./gen/quire/v1/types_pb.js";
import type { Method, Request, Response } from "./methods.js";
import type { Output } from "./options.js";

const METHODS = ModelExecutorService.method;

/** The output options of an append; those of a batch are for items without their own. */
export interface AppendOptions extends CallOptions {
  output?: Output | undefined;
}

export interface ForkOptions extends CallOptions {
  /** Caches to release after the copies are made. May contain caches that are copied. */
  release?: readonly Cache[];
  requestId?: string;
}

/** The result of `verify`. */
export interface Verified {
  /**
   * The accepted drafts, and the token that follows them: what a loop adds to its text. The last one is not in the cache yet:
   * the next `verify` or `decode` appends it.
   */
  tokens: number[];
  /** How many drafts were accepted. These and the first token are kept in the cache. */
  accepted: number;
  /** The prediction after each token that was sent. `outputs[path.at(-1)]` predicts the next token. */
  outputs: StepOutput[];
  /** The indexes of the kept tokens, including the first one: 0 to `accepted`, or a path of the tree. */
  path: number[];
  /** With `score`: the log-probability of each draft under the model's own distribution. */
  tokenLogprobs: number[];
  /** With `score`: for each draft, whether no other token was more likely. */
  tokenIsArgmax: boolean[];
}

/** A client or a session: the operations that do not need a cache. Each takes `timeoutMs`, `priority` and `signal` for itself. */
export abstract class Caller {
  /** Makes a unary call, such as `executor.ModelExecutorService.method.decode`. Throws QuireError. */
  abstract call<I extends DescMessage, O extends DescMessage>(
    method: Method<I, O>,
    request: Request<I>,
    options?: CallOptions,
  ): Promise<Response<O>>;

  /**
   * Creates a cache of tokens; its `output` predicts the next token. The caller releases it. Its later appends have the same
   * output options, unless they are given others: see `Cache.defaultOutput`.
   */
  async prefill(tokenIds: Tokens, settings: PrefillSettings & CallOptions = {}): Promise<Cache> {
    const { timeoutMs, priority, signal, ...item } = settings;
    const request = prefillRequest({ ...item, tokenIds });
    return new Cache(this, await this.call(METHODS.prefill, request, { timeoutMs, priority, signal }), settings.output);
  }

  /**
   * Creates several caches in one call. The caller releases them. A prompt is its token ids, or an object with `tokenIds` and
   * settings. Common prefixes are computed once. The errors of failed items are returned in their places.
   */
  async batchPrefill(prompts: readonly (Tokens | PrefillItem)[], options: AppendOptions = {}): Promise<(Cache | QuireError)[]> {
    const { output, ...call } = options;
    const items = prompts.map((prompt) => prefillRequest(itemOf(prompt), output));
    const { results } = await this.call(METHODS.batchPrefill, { items }, call);
    return results.map((result, at) => {
      const made = resultOf<PrefillResponse>(result);
      return made instanceof QuireError ? made : new Cache(this, made, items[at]!.output);
    });
  }

  /** An existing cache, which another process may have created. Its lease restarts. Throws CacheNotFound. */
  async cache(cacheId: string, options: CallOptions = {}): Promise<Cache> {
    const { kvCache } = await this.call(METHODS.renewCache, { cacheId }, options);
    return new Cache(this, create(PrefillResponseSchema, { kvCache }), undefined);
  }

  /**
   * Appends one token to each cache in one call. An item is [cache, token] or [cache, token, output]; without an output it has
   * that of the options, else its cache's `defaultOutput`. The errors of failed items are returned in their places.
   */
  async batchDecode(
    decodes: readonly (readonly [Cache, number, Output?])[],
    options: AppendOptions = {},
  ): Promise<(StepOutput | QuireError)[]> {
    const { output, ...call } = options;
    const items = decodes.map(([cache, tokenId, own]) => decodeRequest(cache, tokenId, own ?? output));
    const { results } = await this.call(METHODS.batchDecode, { items }, call);
    return results.map((result, at) => {
      const appended = resultOf<DecodeResponse>(result);
      return appended instanceof QuireError ? appended : decodes[at]![0].appended(appended);
    });
  }

  /**
   * Copies several caches, each with its number of copies, and releases others, as a step of a beam search does. Atomic: it
   * fails if a cache does not exist or has another length than `seqLen`. Returns the copies of each cache, which the caller
   * releases.
   */
  async forkCaches(forks: readonly (readonly [Cache, number])[], options: ForkOptions = {}): Promise<Cache[][]> {
    const { release, requestId, ...call } = options;
    const request = {
      forks: forks.map(([{ cacheId, seqLen: position }, count]) => ({ cacheId, count, position })),
      release: idsOf(release),
      // So that a retry returns the same copies.
      requestId: requestId || newRequestId(),
    };
    const { results } = await this.call(METHODS.forkCaches, request, call);
    return forks.map(([origin], at) => copiesOf(this, origin, results[at]!.kvCaches));
  }

  /** Like `score`, but returns the response message. */
  async forward(tokenIds: Tokens, settings: ScoreSettings & CallOptions = {}): Promise<ForwardResponse> {
    const { timeoutMs, priority, signal, ...item } = settings;
    return await this.call(METHODS.forward, forwardRequest({ ...item, tokenIds }), { timeoutMs, priority, signal });
  }

  /**
   * The log-probability of each token given the tokens before it, and the predictions. Keeps no cache. The first token is never
   * scored.
   */
  async score(tokenIds: Tokens, settings: ScoreSettings & CallOptions = {}): Promise<Scored> {
    return scoredOf(await this.forward(tokenIds, settings));
  }

  /**
   * Scores several texts in one call. A text is its token ids, or an object with `tokenIds` and settings. Common prefixes are
   * computed once. The errors of failed items are returned in their places.
   */
  async scoreBatch(texts: readonly (Tokens | ScoreItem)[], options: AppendOptions = {}): Promise<(Scored | QuireError)[]> {
    const { output, ...call } = options;
    const items = texts.map((text) => forwardRequest(itemOf(text), output));
    const { results } = await this.call(METHODS.batchForward, { items }, call);
    return results.map((result) => {
      const scored = resultOf<ForwardResponse>(result);
      return scored instanceof QuireError ? scored : scoredOf(scored);
    });
  }

  /** Makes `cache` use this client or session for its calls from now on. Sends nothing. */
  adopt(cache: Cache): void {
    cache.caller = this;
  }
}

function idsOf(caches: readonly Cache[] = []): string[] {
  return caches.map(({ cacheId }) => cacheId);
}

function copiesOf(caller: Caller, { output, defaultOutput }: Cache, handles: KvCacheHandle[]): Cache[] {
  return handles.map((kvCache) => {
    const made = create(PrefillResponseSchema, { kvCache, output, reusedTokens: kvCache.seqLen });
    return new Cache(caller, made, defaultOutput);
  });
}

function decodeRequest(cache: Cache, tokenId: number, output: Output | undefined): Request<typeof DecodeRequestSchema> {
  checkGiven("tokenId", tokenId);
  return { cacheId: cache.cacheId, position: cache.seqLen, tokenId, output: output ?? cache.defaultOutput };
}

/** Checks for undefined at run time, because the encoder would omit the field. */
function checkGiven(name: string, value: number): void {
  if (!Number.isInteger(value)) throw new TypeError(`${name} must be an integer, not ${value}`);
}

/**
 * A sequence that the server stores. Make one call at a time on it, and release it: `await using` does. Every append sends
 * `seqLen` as `position`: if its response was lost, call it again.
 */
export class Cache implements AsyncDisposable {
  readonly cacheId: string;
  /** The expected number of tokens in the cache. */
  seqLen: number;
  /** The output of the last append; undefined before the first one. */
  output: StepOutput | undefined;
  /** The version of the weights with which the last append was computed; see LoadWeights. */
  weightsVersion: bigint;
  /** Tokens of the prompt whose KV was cached. */
  readonly reusedTokens: number;
  /** Tokens that the last append had to recompute, because their KV was lost or evicted. */
  replayedTokens: number;
  /** For the tokens that the last append scored, from its index max(scoreFrom, 1) on. */
  tokenLogprobs: number[];
  tokenIsArgmax: boolean[];
  /** The tokens that the last prefill drew for its `sampleSeeds`, in order. To continue them, fork the cache. */
  samples: SampledToken[];
  /**
   * The output options of appends that are given none: at first those of the prefill, and of a copy those of its origin.
   * undefined: only the most likely next token.
   */
  defaultOutput: Output | undefined;
  /** The client or session of its calls: see `adopt`. */
  caller: Caller;

  /** Created by `prefill`, `cache` and `fork`. */
  constructor(caller: Caller, prefilled: PrefillResponse, defaultOutput: Output | undefined) {
    const { kvCache, output, reusedTokens, replayedTokens, tokenLogprobs, tokenIsArgmax, samples } = prefilled;
    this.caller = caller;
    this.cacheId = kvCache!.cacheId;
    this.seqLen = kvCache!.seqLen;
    this.weightsVersion = kvCache!.weightsVersion;
    this.output = output;
    this.reusedTokens = reusedTokens;
    this.replayedTokens = replayedTokens;
    this.tokenLogprobs = tokenLogprobs;
    this.tokenIsArgmax = tokenIsArgmax;
    this.samples = samples;
    this.defaultOutput = defaultOutput;
  }

  /** Appends a token and predicts the next one. */
  async decode(tokenId: number, options: AppendOptions = {}): Promise<StepOutput> {
    const { output, ...call } = options;
    return this.appended(await this.caller.call(METHODS.decode, decodeRequest(this, tokenId, output), call));
  }

  /** Appends several tokens and predicts the next one. The settings are those of `prefill`. */
  async extend(
    tokenIds: Tokens,
    settings: AppendOptions & Pick<PrefillSettings, "scoreFrom" | "sampleSeeds"> = {},
  ): Promise<StepOutput> {
    const { output = this.defaultOutput, scoreFrom, sampleSeeds = [], ...call } = settings;
    const request = {
      cacheId: this.cacheId,
      position: this.seqLen,
      tokenIds: tokensOf(tokenIds),
      sampleSeeds: [...sampleSeeds],
      ...{ output, scoreFrom },
    };
    return this.appended(await this.caller.call(METHODS.prefill, request, call));
  }

  /**
   * Appends the last accepted token and draft tokens in one forward, and keeps the accepted ones. `accept` says which: "greedy"
   * (the default) those that are the most likely token at their position, "sampled" those that `output` draws there,
   * "speculative" those that pass rejection sampling, "all" every one. `rows` has one item for each token: the mask for the
   * next token, and the distribution that the next draft was drawn from. With `parents` the tokens are a tree, of which one
   * path is kept; it has the index of each token's parent, except for the first token.
   */
  async verify(
    tokenIds: Tokens,
    settings: AppendOptions & {
      accept?: Accept;
      score?: boolean;
      rows?: Request<typeof VerifyRowSchema>[];
      parents?: number[];
    } = {},
  ): Promise<Verified> {
    const { output = this.defaultOutput, accept = "greedy", score, rows, parents, ...call } = settings;
    const sent = tokensOf(tokenIds);
    const tokens = { cacheId: this.cacheId, position: this.seqLen, tokenIds: sent };
    const request = { ...tokens, output, accept: acceptOf(accept), score, rows, parents };
    return this.#verified(sent, await this.caller.call(METHODS.forwardVerify, request, call));
  }

  /**
   * Truncates the cache; `output` is invalid until the next append. With `seqLen` it undoes an abandoned append that may
   * have been applied. With a shorter length it throws PositionMismatch if the length of the cache is not `seqLen`.
   */
  async truncate(newLen: number, options: CallOptions = {}): Promise<void> {
    checkGiven("newLen", newLen);
    const position = newLen === this.seqLen ? undefined : this.seqLen;
    const cut = await this.caller.call(METHODS.truncateKV, { cacheId: this.cacheId, newLen, position }, options);
    this.seqLen = cut.kvCache!.seqLen;
  }

  /** Copies the cache. The copies share its pages, and the caller releases them. */
  async fork(count = 1, options: ForkOptions = {}): Promise<Cache[]> {
    const { release, requestId, ...call } = options;
    const request = {
      cacheId: this.cacheId,
      count,
      release: idsOf(release),
      requestId: requestId || newRequestId(),
    };
    return copiesOf(this.caller, this, (await this.caller.call(METHODS.forkCache, request, call)).kvCaches);
  }

  /** Keeps the cache for `leaseMs` from now on without use. Undefined: restarts its lease. */
  async renew(leaseMs?: number, options: CallOptions = {}): Promise<void> {
    await this.caller.call(METHODS.renewCache, { cacheId: this.cacheId, lease: durationOf(leaseMs) }, options);
  }

  /**
   * Takes over the length that the cache has on the server, and returns it. Its lease restarts. For a cache that somebody else
   * has changed: after PositionMismatch, say. `output` is still that of this object's last append.
   */
  async refresh(options: CallOptions = {}): Promise<number> {
    const { kvCache } = await this.caller.call(METHODS.renewCache, { cacheId: this.cacheId }, options);
    this.seqLen = kvCache!.seqLen;
    return this.seqLen;
  }

  /** Releases the cache. Returns false if it did not exist any more. */
  async release(options: CallOptions = {}): Promise<boolean> {
    return (await this.caller.call(METHODS.releaseCache, { cacheId: this.cacheId }, options)).released;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.release();
  }

  /** Takes over the response to an append. @internal */
  appended(answer: PrefillResponse | DecodeResponse): StepOutput {
    const isPrefill = answer.$typeName === "quire.v1.PrefillResponse";
    this.#took(answer);
    this.output = answer.output;
    this.tokenLogprobs = isPrefill ? answer.tokenLogprobs : [];
    this.tokenIsArgmax = isPrefill ? answer.tokenIsArgmax : [];
    this.samples = isPrefill ? answer.samples : [];
    return answer.output!;
  }

  #verified(sent: number[], answer: ForwardVerifyResponse): Verified {
    const { accepted, outputs, tokenLogprobs, tokenIsArgmax, acceptedPath } = answer;
    const path = acceptedPath.length ? acceptedPath : Array.from({ length: accepted + 1 }, (_, index) => index);
    this.#took(answer);
    this.output = outputs[path.at(-1)!]!;
    [this.tokenLogprobs, this.tokenIsArgmax, this.samples] = [[], [], []];
    const tokens = [...path.slice(1).map((index) => sent[index]!), this.output.tokenId];
    return { tokens, accepted, outputs, path, tokenLogprobs, tokenIsArgmax };
  }

  #took({ kvCache, replayedTokens }: { kvCache?: KvCacheHandle | undefined; replayedTokens: number }): void {
    this.seqLen = kvCache!.seqLen;
    this.weightsVersion = kvCache!.weightsVersion;
    this.replayedTokens = replayedTokens;
  }
}
