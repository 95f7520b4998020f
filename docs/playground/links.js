// Texts in addresses: behind the #, which is never sent to a server.

/** What the address says behind its #, by name. */
export const link = () => new URLSearchParams(location.hash.slice(1));

export function encoded(text) {
  const bytes = new TextEncoder().encode(text);
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** The text, or undefined where there is none. */
export function decoded(code) {
  if (!code) return undefined;
  try {
    const bytes = Uint8Array.from(atob(code.replaceAll("-", "+").replaceAll("_", "/")), (char) => char.charCodeAt(0));
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return undefined;
  }
}
