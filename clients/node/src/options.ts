/** Output options from plain values. */

import { deflateSync } from "node:zlib";

import type { MessageInitShape } from "@bufbuild/protobuf";

import { dataTypeOf, type NumberFormat } from "./enums.js";
import { type OutputOptionsSchema, SamplingParamsSchema, type TokenMaskSchema } from "./gen/quire/v1/types_pb.js";
import { type Fields, refuse } from "./methods.js";

/** What an append computes and returns: fields of OutputOptions. `outputOptions` makes it from plain values. */
export type Output = MessageInitShape<typeof OutputOptionsSchema>;
export type TokenMask = MessageInitShape<typeof TokenMaskSchema>;
/** How a token is chosen: temperature, topK, seed and the other fields of SamplingParams. */
export type SamplingSettings = Fields<MessageInitShape<typeof SamplingParamsSchema>>;

/** The ids of the tokens that may be chosen; or a packed mask, one bit for each token; or a TokenMask. */
export type Allowed = readonly number[] | Uint8Array | TokenMask;

export interface OutputSettings extends SamplingSettings {
  /** Return the log-probability of the chosen token under the model's own distribution. */
  logprob?: boolean;
  /** Return that under the distribution from which it was drawn. */
  sampledLogprob?: boolean;
  /** Return this many of the most likely tokens, with their log-probabilities. */
  topLogprobs?: number;
  /** Return the log-probabilities of these tokens. */
  logprobTokenIds?: number[];
  /** Return the row of logits in this format. */
  logits?: NumberFormat;
  /** Return hidden states: true for the last one, or the layers' indexes, where 0 is the embedding. */
  hidden?: boolean | number[];
  hiddenFormat?: NumberFormat;
  /** Return the experts that the row's token was routed to. */
  experts?: boolean;
  /** Return the entropy of the model's own distribution, in nats. */
  entropy?: boolean;
  /** The tokens that may be chosen. Undefined: all. */
  allowed?: Allowed;
  /** Default settings, such as `samplingDefaults` of `modelInfo()`. */
  sampling?: SamplingSettings;
}

// Masks of at most this size are not compressed.
const MIN_COMPRESSED_BYTES = 64;
const SAMPLING = new Set(SamplingParamsSchema.fields.map(({ localName }) => localName));

/** How the next token is chosen, and what is returned about it. Throws RangeError for an unknown format, and TypeError. */
export function outputOptions(settings: OutputSettings): Output {
  const [own, rest] = splitSampling(settings);
  const { logits, hidden, hiddenFormat = "f32", allowed, sampling, ...others } = rest as Omit<OutputSettings, keyof SamplingSettings>;
  const { logprob, sampledLogprob, topLogprobs, logprobTokenIds, experts, entropy, ...unknown } = others;
  refuse("an output", unknown);
  return {
    ...{ logprob, sampledLogprob, topLogprobs, logprobTokenIds, experts, entropy },
    logits: dataTypeOf("logits", logits),
    hidden: hidden ? { layers: hidden === true ? [] : hidden, dtype: dataTypeOf("hiddenFormat", hiddenFormat) } : undefined,
    mask: allowed && tokenMask(allowed),
    sampling: samplingOf(sampling, own),
  } as Output;
}

/** Divides settings into those of sampling, without undefined ones, and others. */
export function splitSampling<T extends object>(settings: T): [SamplingSettings, Omit<T, keyof SamplingSettings>] {
  const entries = Object.entries(settings).filter(([, value]) => value !== undefined);
  const own = entries.filter(([name]) => SAMPLING.has(name));
  const rest = entries.filter(([name]) => !SAMPLING.has(name));
  return [Object.fromEntries(own), Object.fromEntries(rest) as Omit<T, keyof SamplingSettings>];
}

/** `own` settings over defaults. Undefined: there are none. */
export function samplingOf(defaults: SamplingSettings | undefined, own: SamplingSettings): SamplingSettings | undefined {
  return defaults || Object.keys(own).length ? { ...defaults, ...own } : undefined;
}

/** A packed mask is deflated if that is smaller. To send it unchanged, pass `{ kind: { case: "packed", value } }`. */
export function tokenMask(allowed: Allowed): TokenMask {
  if (Array.isArray(allowed)) return { kind: { case: "allowed", value: { ids: [...allowed] } } };
  if (!(allowed instanceof Uint8Array)) return allowed as TokenMask;
  const deflated = allowed.length > MIN_COMPRESSED_BYTES ? deflateSync(allowed, { level: 1 }) : undefined;
  if (deflated && deflated.length < allowed.length) return { kind: { case: "deflated", value: deflated } };
  return { kind: { case: "packed", value: allowed } };
}
