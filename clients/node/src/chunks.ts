/** The parts of generated texts, as `execute` returns them. */

import { create } from "@bufbuild/protobuf";

import { type FinishReason, wordOf } from "./enums.js";
import { errorFromStatus, type QuireError } from "./errors.js";
import { FinishReasonSchema, type SampleChunk, type ToolCall, ToolCallSchema, type Usage } from "./gen/quire/v1/runner_pb.js";
import type { ChatMessage } from "./items.js";
import { type Fields, fieldsOf } from "./methods.js";

/** The next part of one sample: the fields of SampleChunk, of which these are read. */
export interface Chunk extends Omit<Fields<SampleChunk>, "finishReason" | "error"> {
  /** Undefined: the sample goes on. */
  finishReason: FinishReason | undefined;
  /** Why the sample failed, with the `finishReason` "error". */
  error: QuireError | undefined;
}

/** One sample as a whole. */
export class Answer {
  /** Without thoughts and calls, if the sample was divided. */
  text = "";
  reasoningContent = "";
  /** In their order, whole. */
  toolCalls: ToolCall[] = [];
  /** "tool_calls" if there are any. */
  finishReason: FinishReason | undefined;
  usage: Usage | undefined;

  constructor(readonly itemId: string, readonly sample: number) {}

  /** It as a message, to send back before the results of its calls. */
  get message(): ChatMessage {
    const message: ChatMessage = { role: "assistant", content: this.text };
    if (this.toolCalls.length) {
      message.content = this.text || null;
      message.tool_calls = this.toolCalls.map(({ id, name, argumentsJson }) => {
        return { id, type: "function", function: { name, arguments: argumentsJson } };
      });
    }
    if (this.reasoningContent) message.reasoning_content = this.reasoningContent;
    return message;
  }

  /** Adds its next chunk, in which malformed calls are text. */
  add(chunk: Chunk): void {
    const begun = new Set(this.toolCalls.map(({ index }) => index));
    const malformed = Object.entries(chunk.malformedCalls).map(([index, text]) => ({ isBegun: begun.has(Number(index)), text }));
    const textOf = (wanted: boolean) => malformed.map(({ isBegun, text }) => (isBegun === wanted ? text : "")).join("");
    this.text += textOf(true) + chunk.text + textOf(false);
    this.reasoningContent += chunk.reasoningContent;
    for (const { index, id, name, argumentsJson } of chunk.toolCalls) {
      const call = this.toolCalls.find((one) => one.index === index);
      if (call) call.argumentsJson += argumentsJson;
      else this.toolCalls.push(create(ToolCallSchema, { index, id, name, argumentsJson }));
    }
    this.toolCalls = this.toolCalls.filter(({ index }) => !(index in chunk.malformedCalls));
    this.finishReason = chunk.finishReason;
    this.usage = chunk.usage;
  }
}

/** The chunk in a message. */
export function chunkOf(message: SampleChunk): Chunk {
  const finishReason = wordOf(FinishReasonSchema, message.finishReason) as FinishReason | undefined;
  return { ...fieldsOf(message), finishReason, error: message.error && errorFromStatus(message.error) };
}
