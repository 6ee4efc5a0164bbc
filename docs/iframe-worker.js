// Search on pages that are opened from a disk. There, browsers start no worker, so that its script
// runs in an empty frame instead. The plugin `offline` of the theme leaves this to a file of this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.window = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.addEventListener("load", () => resolve(inside));
          script.src = url;
          inside.document.head.append(script);
        }, { once: true });
      });
      document.body.append(frame);
    }
    async postMessage(data) {
      (await this.window).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
